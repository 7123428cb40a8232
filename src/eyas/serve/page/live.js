// The second view: what the server does right now, from GET stats, once a second.

import { bars, line } from "./charts.js";
import { el } from "./dom.js";
import { planned, share } from "./explain.js";

const EVERY_MS = 1000;
const KEPT = 120; // samples: two minutes

const whole = (value) => Math.round(value).toLocaleString("en");

function card(title, kind, ...children) {
  return el("section", { class: `card ${kind}` }, el("h2", {}, title), ...children);
}

function figure(value, unit) {
  return el("p", { class: "figure" }, el("strong", {}, value), unit ? el("span", { class: "quiet" }, ` ${unit}`) : null);
}

export class LiveView {
  #timer = null;
  #samples = [];

  constructor(element, server) {
    this.server = server;
    this.speed = el("div");
    this.queue = el("div");
    this.tau = el("div");
    this.depths = el("div");
    this.plans = el("div");
    this.problem = el("p", { class: "bad", role: "alert", hidden: true });
    element.append(
      el("h2", { class: "hidden" }, "Live figures"),
      this.problem,
      el(
        "div",
        { class: "cards" },
        card("Throughput", "", this.speed),
        card("Requests", "", this.queue),
        card("tau", "", this.tau),
        card("Accepted by depth", "half", this.depths),
        card("Which tree the controller chose", "half", this.plans),
      ),
      el("p", { class: "quiet note" }, "Figures of the last seconds, asked for once a second; lines show two minutes. Nothing is recorded while this view is not shown."),
    );
  }

  /** Ask for figures until `stop`. */
  start() {
    if (this.#timer === null) this.#poll();
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  async #poll() {
    const mine = (this.#timer = setTimeout(() => {}, 0)); // until it is another one, this view is shown
    try {
      const stats = await this.server.stats();
      if (this.#timer !== mine) return;
      this.problem.hidden = true;
      this.#show(stats);
    } catch (error) {
      if (this.#timer !== mine) return;
      this.problem.hidden = false;
      this.problem.textContent = error.message;
    }
    this.#timer = setTimeout(() => this.#poll(), EVERY_MS);
  }

  #show(stats) {
    const { recent } = stats;
    this.#samples.push({ speed: recent.tokens_per_second, running: stats.running, waiting: stats.waiting, tau: recent.tau });
    this.#samples = this.#samples.slice(-KEPT);
    const series = (name) => this.#samples.map((sample) => sample[name]);
    const speed = whole(recent.tokens_per_second);
    this.speed.replaceChildren(figure(speed, "tokens/s"), line(series("speed"), KEPT, `Throughput, ${speed} tokens per second`));
    const tau = recent.tau === null ? "\u2013" : recent.tau.toFixed(2);
    const cycle = recent.mean_cycle_ms === null ? "" : `tokens per cycle, ${recent.mean_cycle_ms.toFixed(1)} ms each`;
    this.tau.replaceChildren(figure(tau, cycle || "no cycle lately"), line(series("tau"), KEPT, `tau, ${tau}`));
    this.#showQueue(stats, series);
    this.depths.replaceChildren(this.#depths(recent));
    this.plans.replaceChildren(this.#plans(recent));
  }

  #showQueue({ running, waiting, rows }, series) {
    const seats = el("div", { class: "rows", role: "img", "aria-label": `${running} of ${rows} rows are in use` });
    for (let row = 0; row < Math.min(rows, 64); row++) seats.append(el("span", { class: row < running ? "used" : null }));
    this.queue.replaceChildren(
      figure(`${running} running`, `of ${rows} rows, ${whole(waiting)} waiting`),
      seats,
      line(series("waiting"), KEPT, `Waiting requests, ${waiting}`),
    );
  }

  #depths({ accepted_by_depth }) {
    if (!accepted_by_depth.length) return el("p", { class: "quiet" }, "Nothing was drafted lately.");
    const rows = accepted_by_depth.map((value, depth) => ({ name: `depth ${depth + 1}`, value, shown: share(value), kind: "drafted" }));
    return el("div", {}, bars(rows, 1, ["depth", "", "share"]), el("p", { class: "quiet note" }, "Share of drafted trees whose path got so deep."));
  }

  #plans({ decisions }) {
    const chosen = Object.entries(decisions).sort(([, a], [, b]) => b - a);
    if (!chosen.length) return el("p", { class: "quiet" }, "No cycle lately.");
    const all = chosen.reduce((sum, [, cycles]) => sum + cycles, 0);
    const rows = chosen.map(([plan, cycles]) => ({
      name: el("span", {}, el("strong", {}, plan), el("span", { class: "quiet" }, planned(plan))),
      value: cycles,
      shown: `${Math.round((100 * cycles) / all)} %`,
      kind: plan === "plain" ? "plain" : "drafted",
    }));
    return bars(rows, all, ["tree", "", "share of cycles"]);
  }
}
