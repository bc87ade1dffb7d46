"use strict";
(() => {
  const read_data = (page) => JSON.parse(page.getElementById("data").textContent);
  const data = read_data(document);
  const words = data.words;
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 480, HEIGHT = 260, LEFT = 56, RIGHT = 10, TOP = 10, BOTTOM = 28;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { hidden: new Set(), smooth: 0, log: false, axis: "step" };
  const dashes = ["", "6 3", "2 3"];

  function make(name, attributes, parent, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }
  const color = (number) => `hsl(${(211 + number * 137.5) % 360} 75% ${dark.matches ? 65 : 38}%)`;
  const format = (value) => {
    if (value === null) return "-";
    const size = Math.abs(value);
    if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };

  // An average that forgets, corrected for its start, as in the averages of Adam.
  function smoothed(values, share) {
    if (!share) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = share * sum + (1 - share) * value;
      weight = share * weight + (1 - share);
      return sum / weight;
    });
  }
  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
    return found;
  }
  // Least and greatest; around one value, or several that no tick could tell apart, there is some room.
  function range(values, room) {
    const [low, high] = values.reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [Infinity, -Infinity]);
    const apart = high - low > Math.max(1e-300, 1e-12 * Math.max(Math.abs(low), Math.abs(high)));
    return apart ? [low, high] : [low - room(low), high + room(low)];
  }
  const decades = (low, high) => {
    const found = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++)
      for (const one of [1, 2, 5]) { const at = power + Math.log10(one); if (at >= low - 1e-9 && at <= high + 1e-9) found.push(at); }
    return found.length > 8 ? found.filter((at) => Math.abs(at - Math.round(at)) < 1e-9) : found;
  };

  function lines(chart) {
    const found = [];
    for (const one of chart.lines) {
      if (state.hidden.has(one.run)) continue;
      const xs = state.axis === "epoch" && one.epochs ? one.epochs : one.steps;
      const values = smoothed(one.values, state.smooth);
      const low = one.band && smoothed(one.low, state.smooth), high = one.band && smoothed(one.high, state.smooth);
      const log = state.log && chart.log;
      const y = (value) => (value === null || (log && value <= 0) ? null : log ? Math.log10(value) : value);
      found.push({ ...one, xs, shown: values, ys: values.map(y), low, high, band: one.band && low.map((value, k) => value === null ? null : [y(value), y(high[k])]) });
    }
    return found;
  }
  function path(points) {
    let text = "", open = false;
    for (const [x, y] of points) {
      if (y === null) { open = false; continue; }
      text += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      open = true;
    }
    return text;
  }

  function draw(chart) {
    const svg = chart.svg;
    svg.replaceChildren();
    make("title", {}, svg, chart.title);
    const shown = lines(chart);
    const all = shown.flatMap((one) => [...one.ys, ...(one.band || []).flat()]).filter((y) => y !== null && y !== undefined);
    const across = shown.flatMap((one) => one.xs);
    chart.shown = [];
    chart.readout.replaceChildren();
    if (!all.length) { make("text", { x: LEFT, y: HEIGHT / 2 }, svg, words.nothing); return; }
    const [low, high] = range(all, (at) => Math.abs(at) / 10 || 1), [first, last] = range(across, (at) => Math.max(1, at * 1e-9));
    const x = (value) => LEFT + ((value - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
    const y = (value) => (value === null ? null : TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM));
    const log = state.log && chart.log;
    for (const at of log ? decades(low, high) : ticks(low, high, 5)) {
      make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }, svg);
      make("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, svg, format(log ? 10 ** at : at));
    }
    for (const at of ticks(first, last, 5)) make("text", { x: x(at), y: HEIGHT - 8, "text-anchor": "middle" }, svg, format(at));
    for (const one of shown) {
      if (one.band) {
        const top = one.band.map((pair, k) => [x(one.xs[k]), pair && y(pair[1])]), under = one.band.map((pair, k) => [x(one.xs[k]), pair && y(pair[0])]).reverse();
        const area = [...top, ...under].filter((point) => point[1] !== null && point[1] !== undefined);
        if (area.length > 2) make("path", { d: `${path(area)}Z`, fill: color(one.color), "fill-opacity": 0.18 }, svg);
      }
      const points = one.xs.map((at, k) => [x(at), y(one.ys[k])]);
      make("path", { d: path(points), fill: "none", stroke: color(one.color), "stroke-width": 1.6, "stroke-dasharray": dashes[one.dash % dashes.length] }, svg);
      if (one.xs.length < 40) for (const [px, py] of points) if (py !== null) make("circle", { cx: px, cy: py, r: 2, fill: color(one.color) }, svg);
      chart.shown.push({ ...one, px: points.map((point) => point[0]) });
    }
    chart.cursor = make("line", { class: "grid", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, svg);
    chart.at = undefined;
    chart.back = (px) => first + ((px - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first);
  }
  function nearest(xs, value) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < value) low = middle; else high = middle; }
    return Math.abs(xs[low] - value) <= Math.abs(xs[high] - value) ? low : high;
  }
  function read(chart, px) {
    if (!chart.shown || !chart.shown.length) return;
    const value = chart.back(px);
    const rows = chart.shown.map((one) => { const k = nearest(one.xs, value); return { one, k }; });
    const close = rows.reduce((best, row) => (Math.abs(row.one.xs[row.k] - value) < Math.abs(best.one.xs[best.k] - value) ? row : best));
    const at = close.one.px[close.k];
    chart.at = at;
    chart.cursor.setAttribute("x1", at); chart.cursor.setAttribute("x2", at); chart.cursor.setAttribute("visibility", "visible");
    const list = document.createElement("ul");
    for (const { one, k } of rows) {
      const item = document.createElement("li"), sample = make("svg", { width: 26, height: 8, "aria-hidden": "true" });
      make("line", { x1: 1, x2: 25, y1: 4, y2: 4, stroke: color(one.color), "stroke-width": 2, "stroke-dasharray": dashes[one.dash % dashes.length] }, sample);
      const spread = one.band && one.band[k] ? ` (${format(one.low[k])} ... ${format(one.high[k])})` : "";
      item.append(sample, ` ${one.name}: ${format(one.shown[k])}${spread}`);
      list.append(item);
    }
    chart.readout.replaceChildren(`${words[state.axis]} ${format(close.one.xs[close.k])}`, list);
  }

  // The point that is so far away or, where they are further apart, the next one.
  function next(chart, move) {
    if (chart.at === undefined) return undefined;
    const side = Math.sign(move), ahead = (px) => (px - chart.at) * side;
    const found = chart.shown.flatMap((one) => one.px).filter((px) => ahead(px) > 1e-6).sort((a, b) => ahead(a) - ahead(b));
    return found.find((px) => ahead(px) >= Math.abs(move)) ?? found.at(-1);
  }

  const charts = data.charts.map((chart, number) => {
    const figure = document.getElementById(`chart-${number}`);
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": chart.title });
    const readout = document.createElement("div");
    readout.className = "readout";
    svg.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
    svg.addEventListener("blur", () => readout.removeAttribute("aria-live"));
    figure.append(svg, readout);
    const whole = { ...chart, svg, readout };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      read(whole, ((event.clientX - box.left) / box.width) * WIDTH);
    });
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
      if (!move) return;
      event.preventDefault();
      const to = next(whole, move);
      if (to !== undefined) read(whole, to);
    });
    return whole;
  });
  const all = () => charts.forEach((chart) => { draw(chart); read(chart, WIDTH - RIGHT); });
  const on = (id, kind, act) => { const found = document.getElementById(id); if (found) found.addEventListener(kind, () => { act(found); all(); }); };
  on("log", "change", (box) => { state.log = box.checked; });
  on("smooth", "input", (slider) => { state.smooth = Number(slider.value); });
  on("axis", "change", (box) => { state.axis = box.value; });
  document.querySelectorAll("input[data-run]").forEach((box) => {
    const swatch = box.parentElement.querySelector(".swatch");
    swatch.style.background = color(Number(swatch.dataset.color));
    box.addEventListener("change", () => { if (box.checked) state.hidden.delete(box.dataset.run); else state.hidden.add(box.dataset.run); all(); });
  });
  dark.addEventListener("change", () => { all(); document.querySelectorAll(".swatch").forEach((one) => { one.style.background = color(Number(one.dataset.color)); }); });
  all();

  function set_up_table() {
    const table = document.getElementById("runs");
    if (!table) return;
    const body = table.tBodies[0];
    table.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
      const heading = button.parentElement, down = heading.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach((one) => one.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const number = heading.classList.contains("number");
      const rows = [...body.rows].sort((a, b) => {
        const [one, other] = [key(a), key(b)];
        if (!one || !other) return one ? -1 : other ? 1 : 0;
        return (number ? Number(one) - Number(other) : one.localeCompare(other)) * (down ? -1 : 1);
      });
      body.append(...rows);
    }));
    const filter = document.getElementById("filter");
    filter.addEventListener("input", () => {
      const text = filter.value.toLowerCase();
      for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(text);
    });
  }
  set_up_table();
  window.report = { data, charts, draw: all, set_up_table, read_data }; // for a page that is watched
})();
