// What the colours mean, and what a cycle is: shown while no cycle is selected.

import { el } from "./dom.js";

const key = (kind, text) => el("li", { class: `key ${kind}` }, text);

/** The colours of an answer's tokens. */
export function tokenKeys() {
  return el(
    "ul",
    { class: "keys", "aria-label": "Colours" },
    key("ramp", "drafted and accepted; deeper in the tree, stronger"),
    key("underline", "the target's own"),
    key("prompt", "from the prompt's forward"),
  );
}

/** The text of an empty panel. */
export function introduction() {
  return el(
    "div",
    { class: "intro" },
    el("h2", {}, "Every cycle, token by token"),
    el("p", {}, "A draft guesses a tree of continuations, and the target checks the whole tree in one forward. " +
      "The path that the target itself takes is kept, and the target adds one token of its own. That is one cycle."),
    el("p", {}, "Click a token of an answer, or move to it with the Tab key, to see the cycle behind it. " +
      "Arrow keys left and right go from cycle to cycle, up and down from token to token."),
    tokenKeys(),
  );
}
