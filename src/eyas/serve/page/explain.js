// A cycle in words and numbers. Pure, but for the elements of its sentences.

import { chip, el } from "./dom.js";

/** A probability in little room: .93, 1, <.01. */
export function share(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value >= 0.995) return "1";
  if (value > 0 && value < 0.005) return "<.01";
  return value.toFixed(2).replace(/^0/, "");
}

/** Milliseconds with three digits. */
export function milliseconds(value) {
  return `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

/** "1 token", "2 tokens". */
export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** What the controller chose, in words. */
export function planned(plan) {
  if (plan === "plain") return "nothing was drafted";
  if (plan === "fixed") return "by the method's options";
  const [nodes, depth, branch] = plan.split("/");
  if (!branch) return "drafted from the text alone";
  return `up to ${count(+nodes, "node")}, ${count(+depth, "level")}, ${branch === "1" ? "1 child" : `${branch} children`}`;
}

/** How a token came about: "prompt", "plain", "own" or "drafted"; and its depth in the tree. */
export function kindOf(cycle, token) {
  if (cycle.prefill) return { kind: "prompt", depth: 0 };
  const { node } = cycle.tokens[token];
  if (node === null) return { kind: cycle.nodes.length > 1 ? "own" : "plain", depth: 0 };
  return { kind: "drafted", depth: cycle.nodes[node]?.depth ?? token + 1 };
}

/** The number of drafted tokens that the cycle emitted. */
export function accepted(cycle) {
  return cycle.tokens.filter(({ node }) => node !== null).length;
}

/** One line for a screen reader. */
export function summary(cycle, cycles) {
  if (cycle.prefill) return `The prompt's forward: the first token, "${cycle.tokens[0].text}".`;
  const text = cycle.tokens.map((token) => token.text).join("");
  const last = cycles.at(-1).number;
  return `Cycle ${cycle.number} of ${last}: "${text}", ${count(cycle.tokens.length, "token")}, ${accepted(cycle)} of them drafted.`;
}

const listed = (texts) => texts.flatMap((text, i) => (i ? [i === texts.length - 1 ? " and " : ", ", chip(text)] : [chip(text)]));

/** Why the path ended where it did. */
export function reason(cycle) {
  if (cycle.prefill) return el("p", {}, "The target read the prompt and drew the first token. This is the prompt's pass, not a draft cycle.");
  const end = cycle.nodes[cycle.path.at(-1)];
  if (!end) return el("p", {}, "The server sent no tree for this cycle.");
  const own = chip(cycle.bonus_text);
  if (cycle.ended === "stop") return el("p", {}, "The answer ends here: an end token or a stop string is complete.");
  if (cycle.ended === "length") return el("p", {}, "The answer ends here: it has as many tokens as were asked for.");
  if (cycle.nodes.length === 1) return el("p", {}, "Nothing was drafted in this cycle. The target wrote ", own, " itself.");
  if (cycle.ended === "no child") {
    return el("p", {}, "The path reached a leaf: nothing was drafted after ", chip(end.text), ". The target added ", own, " itself.");
  }
  const offered = cycle.nodes.filter((node) => node.parent === cycle.path.at(-1)).sort((a, b) => (b.q ?? 0) - (a.q ?? 0));
  const shown = offered.slice(0, 4).map((node) => node.text);
  const more = offered.length > shown.length ? ` and ${offered.length - shown.length} more` : "";
  return el("p", {}, "After ", chip(end.text), " the draft offered ", ...listed(shown), `${more}. The target drew `, own, ", which is none of them.");
}
