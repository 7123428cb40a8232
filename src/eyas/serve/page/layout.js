// Where the nodes of a draft tree stand. Pure: this module knows no element and no font.
//
// The tree grows to the right, one column for each depth. The first child stands on its parent's line and the accepted child comes
// first, so the accepted path is one straight line at the top, with the target's own token at its end.

/** The nodes to draw: those of the cycle and, last, the token that the target added after the path. */
export function drawnNodes(cycle) {
  const onPath = new Set(cycle.path);
  const nodes = cycle.nodes.map((node, n) => ({ ...node, kind: n === 0 ? "root" : onPath.has(n) ? "accepted" : "refused" }));
  const own = cycle.tokens.at(-1);
  if (own && own.node === null && cycle.path.length) {
    const parent = cycle.path.at(-1);
    nodes.push({ parent, depth: nodes[parent].depth + 1, text: cycle.bonus_text, token: own.token, q: null, p: null, kind: "own" });
  }
  return nodes;
}

const RANK = { accepted: 0, own: 0, refused: 1 };

/**
 * Boxes for nodes, in the same order.
 *
 * widthOf: the width of a node's box; sizes: row (from line to line), box (height), gap (between columns), all in pixels.
 */
export function layOut(nodes, widthOf, { row, box, gap }) {
  const children = nodes.map(() => []);
  nodes.forEach((node, n) => n > 0 && children[node.parent].push(n));
  for (const siblings of children) {
    siblings.sort((a, b) => RANK[nodes[a].kind] - RANK[nodes[b].kind] || (nodes[b].q ?? 0) - (nodes[a].q ?? 0));
  }
  const widths = nodes.map(widthOf);
  const columns = [];
  nodes.forEach(({ depth }, n) => (columns[depth] = Math.max(columns[depth] ?? 0, widths[n])));
  const lefts = columns.map((_, depth) => columns.slice(0, depth).reduce((sum, width) => sum + width + gap, 0));
  const lines = [];
  let used = 0;
  const waiting = nodes.length ? [[0, 0]] : []; // [node, its rank among its siblings], deepest first
  while (waiting.length) {
    const [n, rank] = waiting.pop();
    lines[n] = rank === 0 && n > 0 ? lines[nodes[n].parent] : used++;
    children[n].map((child, place) => [child, place]).reverse().forEach((pair) => waiting.push(pair));
  }
  const boxes = nodes.map(({ depth }, n) => ({ x: lefts[depth], y: lines[n] * row, width: widths[n], height: box }));
  const width = Math.max(0, ...boxes.map((place) => place.x + place.width));
  return { boxes, width, height: Math.max(0, used * row - (row - box)), columns: columns.map((w, d) => ({ x: lefts[d], width: w })) };
}
