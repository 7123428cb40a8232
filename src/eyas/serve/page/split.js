// Which token of which cycle wrote which part of an answer.
//
// A cycle brings its tokens with their texts, and the text that the server lets go with it. That text may come late: characters that
// are not complete, or the beginning of a stop string, are held back. So the tokens wait in a queue, and the text is matched with them
// from the left.

/** Splits one answer's text; `take` returns [{ text, cycle, token }] with numbers, or null for text that no token brought. */
export class Splitter {
  #waiting = [];

  /** The tokens of cycle number `cycle` have been decided. */
  expect(cycle, tokens) {
    tokens.forEach(({ text }, token) => text && this.#waiting.push({ text, cycle, token }));
  }

  /** The next part of the answer's text. */
  take(text) {
    const parts = [];
    let rest = text;
    while (rest && this.#waiting.length) {
      const next = this.#waiting[0];
      if (rest.startsWith(next.text)) {
        parts.push(this.#waiting.shift());
        rest = rest.slice(next.text.length);
      } else if (next.text.startsWith(rest)) {
        parts.push({ ...next, text: rest });
        next.text = next.text.slice(rest.length);
        rest = "";
      } else {
        const { cycle, token } = this.#waiting.at(-1); // the server changed the text: it belongs to what came last
        this.#waiting = [];
        parts.push({ text: rest, cycle, token });
        rest = "";
      }
    }
    if (rest) parts.push({ text: rest, cycle: null, token: null });
    return parts;
  }
}
