// Draws one cycle's tree as SVG: token texts, q and p at each node, the accepted path and the target's own token.

import { el, svg, visible } from "./dom.js";
import { share } from "./explain.js";
import { drawnNodes, layOut } from "./layout.js";

const SIZES = { row: 46, box: 38, gap: 22 };
const PADDING = 8;
const MARGIN = 4;
const LEGIBLE = 0.76; // the smallest scale that is chosen unasked
const LETTERS = 16; // of a token's text; the rest is in its tooltip
const FONT = '13px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace';
const SMALL = '11px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace';

const canvas = document.createElement("canvas").getContext("2d");

function widthOfText(text, font) {
  canvas.font = font;
  return canvas.measureText(text).width;
}

const numbers = (node) =>
  node.kind === "root" ? "" : node.kind === "own" ? "target's own" : `q${share(node.q)} p${share(node.p)}`;

function widthOf(node) {
  const text = widthOfText(visible(node.text, LETTERS), FONT);
  return Math.ceil(Math.max(text, widthOfText(numbers(node), SMALL), 18)) + 2 * PADDING;
}

function edge(from, to) {
  const [x0, y0] = [from.x + from.width, from.y + from.height / 2];
  const [x1, y1] = [to.x, to.y + to.height / 2];
  if (y0 === y1) return `M${x0} ${y0}H${x1}`;
  const turn = x1 - SIZES.gap / 2;
  const radius = 7;
  return `M${x0} ${y0}H${turn - radius}Q${turn} ${y0} ${turn} ${y0 + radius}V${y1 - radius}Q${turn} ${y1} ${turn + radius} ${y1}H${x1}`;
}

function told(node) {
  if (node.kind === "root") return `${visible(node.text)}: the newest token before this cycle`;
  if (node.kind === "own") return `${visible(node.text)}: the target's own token`;
  const verdict = node.kind === "accepted" ? "accepted" : "not on the target's path";
  return `${visible(node.text)}: depth ${node.depth}, q ${share(node.q)}, p ${share(node.p)}, ${verdict}`;
}

function drawNode(node, place) {
  const middle = node.kind === "root";
  return svg(
    "g",
    { class: `node ${node.kind}`, transform: `translate(${place.x} ${place.y})`, "--p": node.p ?? 0 },
    svg("title", {}, told(node)),
    svg("rect", { width: place.width, height: place.height, rx: 7 }),
    svg("text", { class: "token", x: PADDING, y: middle ? 23.5 : 16 }, visible(node.text, LETTERS)),
    middle ? null : svg("text", { class: "numbers", x: PADDING, y: 30.5 }, numbers(node)),
  );
}

/** The picture of a cycle's tree; null where the cycle has none. `scale` is a number, "fit" (to `room` pixels), or "auto": fit, but legible. */
export function drawTree(cycle, scale, room) {
  const nodes = drawnNodes(cycle);
  if (!nodes.length) return null;
  const { boxes, width, height } = layOut(nodes, widthOf, SIZES);
  const [outerWidth, outerHeight] = [width + 2 * MARGIN, height + 2 * MARGIN];
  const fit = Math.min(1, room / outerWidth);
  const factor = { fit, auto: Math.max(LEGIBLE, fit) }[scale] ?? scale;
  const order = { refused: 0, accepted: 1, own: 1 };
  const edges = nodes
    .map((node, n) => [node, n])
    .slice(1)
    .sort(([a], [b]) => order[a.kind] - order[b.kind]) // the accepted path on top
    .map(([node, n]) => svg("path", { class: `edge ${node.kind}`, d: edge(boxes[node.parent], boxes[n]), "--q": node.q ?? 0 }));
  const emitted = nodes.filter(({ kind }) => kind === "accepted").length;
  return svg(
    "svg",
    {
      class: "tree",
      role: "img",
      "aria-label": `Draft tree of ${cycle.nodes.length - 1} tokens, ${emitted} of them accepted`,
      width: outerWidth * factor,
      height: outerHeight * factor,
      viewBox: `${-MARGIN} ${-MARGIN} ${outerWidth} ${outerHeight}`,
    },
    ...edges,
    ...nodes.map((node, n) => drawNode(node, boxes[n])),
  );
}

/** The same as a table, for screen readers and for reading numbers. */
export function nodeTable(cycle) {
  const heads = ["depth", "token", "after", "q", "p", ""];
  const rows = cycle.nodes.slice(1).map((node, i) => {
    const verdict = cycle.path.includes(i + 1) ? "accepted" : "";
    const cells = [node.depth, visible(node.text), visible(cycle.nodes[node.parent].text), share(node.q), share(node.p), verdict];
    return el("tr", { class: verdict }, ...cells.map((cell) => el("td", {}, String(cell))));
  });
  return el(
    "table",
    { class: "numbers" },
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head || "verdict")))),
    el("tbody", {}, ...rows),
  );
}
