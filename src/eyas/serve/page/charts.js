// Small charts as SVG. A screen reader gets the label, which says the newest value.

import { el, svg } from "./dom.js";

const [WIDTH, HEIGHT] = [600, 96]; // of a line, in its own units; the page stretches it

/** A line over the last `capacity` values, the newest at the right; null is a gap. Its scale begins at 0. */
export function line(values, capacity, label) {
  const top = Math.max(1e-9, ...values.map((value) => value ?? 0)) * 1.12;
  const step = WIDTH / (capacity - 1);
  const runs = [[]];
  values.forEach((value, i) => {
    if (value === null) return runs.at(-1).length && runs.push([]);
    const x = WIDTH - (values.length - 1 - i) * step;
    runs.at(-1).push([x, HEIGHT - (value / top) * (HEIGHT - 2) - 1]);
  });
  const drawn = runs.filter((run) => run.length);
  const path = (run) => run.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const area = (run) => `${path(run)}L${run.at(-1)[0].toFixed(1)} ${HEIGHT}L${run[0][0].toFixed(1)} ${HEIGHT}Z`;
  return svg(
    "svg",
    { class: "line", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    ...drawn.map((run) => svg("path", { class: "area", d: area(run) })),
    ...drawn.map((run) => svg("path", { class: "stroke", d: path(run), "vector-effect": "non-scaling-stroke" })),
  );
}

/** Bars as a table: [{ name, value, shown }], each as long as its share of the greatest `most`. */
export function bars(rows, most, heads) {
  const body = rows.map(({ name, value, shown, kind }) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name),
      el("td", { class: "length" }, el("span", { class: kind, "--share": most ? value / most : 0 })),
      el("td", { class: "value" }, shown),
    ),
  );
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
  return el("table", { class: "bars" }, el("thead", { class: "hidden" }, head), el("tbody", {}, ...body));
}
