"use strict";
(() => {
  const { data, charts, draw, set_up_table, read_data } = window.report;

  // A page that is served asks for itself again: what has changed is put in, and all settings stay.
  async function renew() {
    let page;
    try {
      const answer = await fetch("/");
      if (!answer.ok) return;
      page = new DOMParser().parseFromString(await answer.text(), "text/html");
    } catch { return; } // nobody serves it any more
    const fresh = read_data(page), titles = (of) => JSON.stringify(of.charts.map((chart) => chart.title));
    if (titles(fresh) !== titles(data)) { location.reload(); return; }
    for (const part of page.querySelectorAll("header, section")) {
      const name = part.getAttribute("aria-labelledby");
      const old = document.querySelector(name ? `section[aria-labelledby="${name}"]` : "header");
      if (name === "h-curves" || !old || old.contains(document.activeElement) || old.innerHTML === part.innerHTML) continue;
      old.replaceWith(document.adoptNode(part));
      if (name === "h-runs") set_up_table();
    }
    if (JSON.stringify(fresh.charts) === JSON.stringify(data.charts)) return;
    data.charts = fresh.charts;
    charts.forEach((chart, number) => Object.assign(chart, fresh.charts[number]));
    draw();
  }
  setInterval(renew, data.watch * 1000);
})();
