/* The site's search: that of `flambeau how`, step by step as in src/flambeau/cli/recipe_search.py, over the
   same entries, which tools/build_site.py writes into search_index.js. tests/test_site_search.py compares the
   answers of both. It needs no network: a page opened from a folder loads the index by a script element. */
"use strict";

const flambeauSearch = (() => {
  const CHINESE = /[\u4e00-\u9fff]/;
  const isChinese = (text) => CHINESE.test(text);
  const count = (words) => {
    const counts = new Map();
    for (const word of words) counts.set(word, (counts.get(word) ?? 0) + 1);
    return counts;
  };
  const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
  const escaped = (text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
  const split = (text) => text.split(/\s+/).filter(Boolean);

  /** The common characters of GB 2312, which it sorts by their sound, with their numbers. */
  const COMMON_CHARACTERS = new Map();
  const decoder = new TextDecoder("gb2312");
  for (let high = 0xb0; high <= 0xd7; high++) {
    for (let low = 0xa1; low <= 0xfe; low++) {
      const one = decoder.decode(new Uint8Array([high, low]));
      if (high * 256 + low <= 0xd7f9) COMMON_CHARACTERS.set(one, high * 256 + low);
    }
  }

  class Index {
    constructor({entries, synonyms, rules}) {
      this.rules = rules;
      this.runs = new Map();
      this.chineseStop = new RegExp(rules.chineseStop, "g");
      this.stopStems = new Set(rules.stopWords.map((word) => this.stem(word)));
      this.synonyms = synonyms.flatMap((group) => group.map((text) => [text, group]));
      this.synonyms.sort(([one], [other]) => other.length - one.length);
      this.entries = entries;
      this.counts = entries.map(({texts}) => Object.entries(texts)
        .map(([where, lines]) => [where, count(this.tokens(lines.join(" ")))]));
      const lengths = this.counts.map((fields) =>
        sum([...(fields.find(([where]) => where === "body")?.[1] ?? new Map()).values()]));
      const average = sum(lengths) / lengths.length || 1;
      this.lengths = lengths.map((length) => length / average);
      this.plain = entries.map(({texts}) =>
        split(Object.values(texts).flat().join("\n").toLowerCase().replaceAll("`", "")).join(" "));
      const held = count(this.counts.flatMap((fields) =>
        [...new Set(fields.flatMap(([, counts]) => [...counts.keys()]))]));
      this.weightOf = new Map([...held].map(([word, number]) =>
        [word, Math.log(1 + entries.length / (number + 0.5))]));
      this.questions = entries.map(({messages, texts}) =>
        (messages ? texts.title.join(" ").split(/[、,]/) : texts.asked ?? [])
          .map((question) => this.tellingWords(question)));
      this.firsts = [...rules.firstOfSyllables].map((one) => COMMON_CHARACTERS.get(one));
      const terms = new Set(synonyms.flat().flatMap((text) => this.tokens(text)));
      this.pairs = new Map([...held].filter(([word]) => isChinese(word)).map(([word, number]) =>
        [word, terms.has(word) ? Math.max(number, rules.commonPair) : number]));
      this.pairOf = new Map();
      for (const [pair, number] of [...this.pairs].sort(([one, n], [other, m]) =>
        m - n || (one < other ? -1 : 1))) {
        const sounds = number >= rules.commonPair && pair.length === 2 && this.soundsOf(pair);
        if (sounds && !this.pairOf.has(sounds)) this.pairOf.set(sounds, pair);
      }
    }

    /** The best entries for a query: {entry, title, line}. */
    search(query, top) {
      const words = this.corrected(this.missingName(query) ?? query);
      const concepts = this.concepts(words);
      const total = sum(concepts.map((concept) => concept.weight));
      const phrase = split(words.toLowerCase()).join(" ");
      const asked = this.messageWords(query);
      const telling = this.tellingWords(words);
      const found = [];
      this.entries.forEach((entry, number) => {
        const points = concepts.map((concept) => this.points(concept, number));
        const held = sum(concepts.filter((_, k) => points[k]).map((concept) => concept.weight));
        if (!held) return;
        let score = sum(points) * (held / total) ** 2;
        score *= 1 + this.rules.question * likeness(telling, this.questions[number]);
        let matched = 0;
        if (entry.messages) {
          score *= this.rules.answer;
          matched = this.longestMessage(entry.messages, asked);
        }
        if (entry.kind === "rule") score *= this.rules.rule;
        if (concepts.length > 1 && this.plain[number].includes(phrase)) score *= this.rules.phrase;
        found.push({matched, score, entry});
      });
      found.sort((a, b) => b.matched - a.matched || b.score - a.score
        || (a.entry.name < b.entry.name ? -1 : a.entry.name > b.entry.name ? 1 : 0));
      const known = new Set(concepts.flatMap((concept) => concept.alternatives.flat()));
      return found.slice(0, top).map(({entry}) => ({
        entry,
        title: entry.kind === "page" ? entry.line : entry.name,
        line: entry.kind === "page" ? this.bestLine(entry, known) : entry.line,
      }));
    }

    /** The words of a question that an entry has, in their order, and their weights. */
    tellingWords(text) {
      return new Map(this.tokens(text.replace(this.chineseStop, " "))
        .filter((word) => this.weightOf.has(word))
        .map((word) => [word, this.weightOf.get(word)]));
    }

    concepts(words) {
      const [groups, rest] = this.synonymsIn(words);
      let tokens = [...new Set(this.tokens(rest.replace(this.chineseStop, " ")))]
        .filter((word) => !this.stopStems.has(word) && !/^[0-9]+$/.test(word));
      if (!tokens.length && !groups.length) tokens = [...new Set(this.tokens(words))];
      return [...groups, ...tokens.map((word) => [[word]])]
        .map((alternatives) => this.known(alternatives)).filter(Boolean);
    }

    known(alternatives) {
      let kept = alternatives.filter((part) => part.every((word) => this.weightOf.has(word)));
      if (!kept.length && alternatives.length === 1) {
        const near = nearest(alternatives[0].at(-1), [...this.weightOf.keys()]);
        kept = near === null ? [] : [[near]];
      }
      if (!kept.length) return null;
      const weights = kept[0].map((word) => this.weightOf.get(word));
      return {alternatives: kept, weight: sum(weights) / Math.sqrt(weights.length)};
    }

    points({alternatives, weight}, number) {
      let best = 0;
      alternatives.forEach((part, k) => {
        const points = part.map((word) => this.pointsOf(word, number));
        if (points.every(Boolean)) {
          best = Math.max(best, sum(points) / points.length * (k ? this.rules.synonym : 1));
        }
      });
      return weight * best;
    }

    pointsOf(word, number) {
      let points = 0;
      for (const [where, counts] of this.counts[number]) {
        const times = counts.get(word);
        if (!times) continue;
        const half = where === "body" ? 1.2 * (0.25 + 0.75 * this.lengths[number]) : 0.5;
        points += this.rules.weights[where] * times / (times + half);
      }
      return points;
    }

    synonymsIn(words) {
      const found = [];
      let rest = ` ${split(words.toLowerCase()).join(" ")} `;
      for (const [text, group] of this.synonyms) {
        if (!rest.includes(text)) continue;
        const letter = "[A-Za-z0-9_.]";
        const pattern = isChinese(text) ? escaped(text)
          : `(?<!${letter})${escaped(text)}(?!${letter})`;
        const shorter = rest.replace(new RegExp(pattern, "gu"), " ");
        if (shorter === rest) continue;
        rest = shorter;
        const parts = [text, ...group.filter((other) => other !== text)]
          .map((other) => this.tokens(other));
        found.push([...new Map(parts.map((part) => [part.join(" "), part])).values()]);
      }
      return [found, rest];
    }

    /** The text with pairs of characters that no entry has replaced by those of the same sound. */
    corrected(text) {
      for (;;) {
        let best = null;
        for (let start = 0; start < text.length - 1; start++) {
          const pair = text.slice(start, start + 2);
          const sounds = this.pairs.has(pair) ? null : this.soundsOf(pair);
          const other = sounds && this.pairOf.get(sounds);
          if (!other) continue;
          const left = text.slice(Math.max(0, start - 1), start);
          const right = text.slice(start + 2, start + 3);
          if (this.knownPairs(left + other + right) <= this.knownPairs(left + pair + right)) continue;
          if (!best || this.pairs.get(other) > this.pairs.get(best.other)) best = {start, other};
        }
        if (!best) return text;
        text = text.slice(0, best.start) + best.other + text.slice(best.start + 2);
      }
    }

    knownPairs(text) {
      const starts = Array.from({length: Math.max(0, text.length - 1)}, (_, start) => start);
      return starts.filter((start) => this.pairs.has(text.slice(start, start + 2))).length;
    }

    soundsOf(word) {
      const places = [...word].map((one) => COMMON_CHARACTERS.get(one));
      if (places.some((place) => place === undefined)) return null;
      return places.map((place) => this.firsts.filter((first) => first <= place).length).join(" ");
    }

    missingName(words) {
      let found = words.match(/module '([\w.]+)' has no attribute '(\w+)'/);
      if (found) return `${found[1]}.${found[2]}`;
      found = words.match(/cannot import name '(\w+)' from '([\w.]+)'/);
      return found && `${found[2]}.${found[1]}`;
    }

    messageWords(text) {
      return text.toLowerCase().match(/[a-z_]{2,}/g) ?? [];
    }

    longestMessage(messages, words) {
      let longest = 0;
      for (const message of messages) {
        let at = 0;
        for (const word of words) if (word === message[at]) at += 1;
        if (message.length >= this.rules.shortestMessage && at === message.length) {
          longest = Math.max(longest, message.length);
        }
      }
      return longest;
    }

    bestLine(entry, known) {
      const lines = this.prose(entry.texts.body ?? []);
      let best = 0;
      let line = lines[0] ?? entry.line;
      for (const text of lines) {
        const held = new Set(this.tokens(text).filter((word) => known.has(word)));
        const points = sum([...held].map((word) => this.weightOf.get(word)));
        if (points > best + 1e-9) [best, line] = [points, text];
      }
      return line;
    }

    prose(lines) {
      const found = [];
      let isCode = false;
      for (const one of lines) {
        const text = one.replace(/\[([^\]]*)\]\(([^)\s]+)\)/g, "$1").trim().replace(/^- /, "");
        if (text.startsWith("```")) {
          isCode = !isCode;
        } else if (!isCode && text && !/^(\|--|!)/.test(text)) {
          const cells = text.replace(/^\|+|\|+$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
          const row = cells.slice(0, 2).filter(Boolean).join(": ").replaceAll("\\|", "|");
          found.push(text.startsWith("|") ? row : text);
        }
      }
      return found;
    }

    tokens(text) {
      const words = (text.match(/[A-Za-z0-9]+|[\u4e00-\u9fff]+/g) ?? []).flatMap((run) => {
        if (!this.runs.has(run)) this.runs.set(run, this.tokensOf(run));
        return this.runs.get(run);
      });
      const names = (text.match(/(?<!\w)[A-Za-z]\w*(?:\.\w+)*/g) ?? []).flatMap((name) => {
        const parts = name.toLowerCase().split(".");
        return [
          ...(parts.length > 1 ? [parts.slice(-2).join(".")] : []),
          ...(parts.at(-1).includes("_") ? [parts.at(-1)] : []),
        ];
      });
      return [...words, ...names];
    }

    tokensOf(run) {
      if (isChinese(run)) {
        return Array.from({length: Math.max(1, run.length - 1)}, (_, k) => run.slice(k, k + 2));
      }
      const isUpper = /[A-Z]/.test(run) && !/[a-z]/.test(run);
      let parts = run.match(/[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+/g) ?? [];
      if (parts.length < 2 || isUpper) parts = [];
      parts = parts.filter((part) => part.length > 1);
      return [run, ...parts].map((part) => this.stem(part.toLowerCase()));
    }

    stem(word) {
      const ending = this.rules.suffixes
        .find((suffix) => word.endsWith(suffix) && word.length - suffix.length >= 3);
      return ending ? word.slice(0, -ending.length) : word;
    }
  }

  /** The largest share, by weight, that a query and a question have in common: from 0 to 1. */
  function likeness(query, questions) {
    const total = sum([...query.values()]);
    let best = 0;
    for (const question of questions) {
      const common = sum([...question].filter(([word]) => query.has(word)).map(([, one]) => one));
      if (common) best = Math.max(best, 2 * common / (total + sum([...question.values()])));
    }
    return best;
  }

  /** As difflib.get_close_matches(word, known, 1, 0.8), among words with the same first letter. */
  function nearest(word, known) {
    if (word.length < 3 || word.length > 40 || isChinese(word)) return null;
    const letters = [...word].sort().join("");
    const swapped = known.filter((one) => one[0] === word[0] && [...one].sort().join("") === letters);
    swapped.sort();
    if (swapped.length) return swapped[0];
    if (word.length < 4) return null;
    let best = null;
    let highest = 0.8;
    for (const one of known) {
      const total = one.length + word.length;
      if (one[0] !== word[0] || 2 * Math.min(one.length, word.length) / total < 0.8) continue;
      const ratio = 2 * common(one, word) / total;
      if (ratio > highest || (ratio === highest && (best === null || one > best))) {
        [best, highest] = [one, ratio];
      }
    }
    return best;
  }

  /** Letters in blocks that two words have in common: the longest first, then to its left and right. */
  function common(one, other) {
    let [length, left, right] = [0, 0, 0];
    for (let i = 0; i < one.length; i += 1) {
      for (let j = 0; j < other.length; j += 1) {
        let k = 0;
        while (i + k < one.length && one[i + k] === other[j + k]) k += 1;
        if (k > length) [length, left, right] = [k, i, j];
      }
    }
    return length && length + common(one.slice(0, left), other.slice(0, right))
      + common(one.slice(left + length), other.slice(right + length));
  }

  return {Index, isChinese};
})();

if (typeof document !== "undefined") (() => {
  const SHOWN = 8; // while one types
  const LISTED = 30; // on the page of the search
  const indexes = {};

  /** Loads the index of a language once; it sets flambeauIndex. */
  function indexOf(form, language) {
    indexes[language] ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${form.dataset.root}../${language}/_static/search_index.js`;
      script.onload = () => resolve(new flambeauSearch.Index(window.flambeauIndex[language]));
      script.onerror = () => {
        delete indexes[language]; // the next key tries again
        reject(new Error(`${script.src} did not load`));
      };
      document.head.append(script);
    });
    return indexes[language];
  }

  function item({entry, title, line}, base) {
    const made = document.createElement("li");
    const link = document.createElement("a");
    link.href = base + entry.url;
    link.textContent = plain(title);
    const text = document.createElement("p");
    text.textContent = plain(line);
    made.append(link, text);
    return made;
  }

  const plain = (text) => text.replace(/\*\*|`/g, "");

  async function show(form, list, query, top) {
    const own = form.dataset.language;
    const language = flambeauSearch.isChinese(query) ? "zh" : own;
    const status = form.querySelector("[role=status]");
    let index;
    try {
      index = await indexOf(form, language);
    } catch {
      status.textContent = form.dataset.failed;
      list.hidden = true;
      return;
    }
    if (form.q.value !== query) return; // more has been typed
    const found = query.trim() ? index.search(query, top) : [];
    const base = `${form.dataset.root}${language === own ? "" : `../${language}/`}`;
    list.replaceChildren(...found.map((one) => item(one, base)));
    list.lang = language === "zh" ? "zh-CN" : "en";
    status.textContent = query.trim() && !found.length ? form.dataset.nothing : "";
    list.hidden = !found.length;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const form = document.querySelector("form.site-search");
    const below = form.querySelector("ol");
    const page = document.getElementById("search-results");
    const asked = new URLSearchParams(location.search).get("q");
    if (page && asked) {
      form.q.value = asked;
      show(form, page, asked, LISTED);
    }
    form.q.addEventListener("focus", () => {
      indexOf(form, form.dataset.language).catch(() => {}); // `show` says it
    }, {once: true});
    form.q.addEventListener("input", () => {
      show(form, page ?? below, form.q.value, page ? LISTED : SHOWN);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") below.hidden = true;
    });
    document.addEventListener("click", (event) => {
      if (!form.contains(event.target)) below.hidden = true;
    });
  });
})();

if (typeof module !== "undefined") module.exports = flambeauSearch;
