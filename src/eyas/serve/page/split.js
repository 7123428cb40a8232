// Which token of which cycle wrote which part of an answer.
//
// A cycle brings its tokens with their texts, and the text that the server lets go comes beside it: later than its tokens (characters
// that are not complete, or the beginning of a stop string, are held back) or earlier (the prompt's first token and the first cycle are
// decoded together). So tokens wait for text, and text waits for tokens; they are matched from the left.

/** Splits one answer's text into [{ text, cycle, token }], with numbers; null for text that no token brought. */
export class Splitter {
  #tokens = []; // that wait for their text
  #text = ""; // that waits for its tokens

  /** The next part of the answer: its text, and the tokens of cycle number `cycle`; without tokens there is nothing to wait for. */
  add(text, tokens, cycle) {
    tokens.forEach(({ text }, token) => text && this.#tokens.push({ text, cycle, token }));
    this.#text += text;
    const parts = this.#matched();
    return tokens.length ? parts : [...parts, ...this.rest()];
  }

  #matched() {
    const parts = [];
    while (this.#text && this.#tokens.length) {
      const next = this.#tokens[0];
      if (this.#text.startsWith(next.text)) {
        parts.push(this.#tokens.shift());
        this.#text = this.#text.slice(next.text.length);
      } else if (next.text.startsWith(this.#text)) {
        parts.push({ ...next, text: this.#text });
        next.text = next.text.slice(this.#text.length);
        this.#text = "";
      } else {
        parts.push({ ...this.#tokens.at(-1), text: this.#text }); // the server changed the text: it belongs to what came last
        this.#tokens = [];
        this.#text = "";
      }
    }
    return parts;
  }

  /** What is left at the end. */
  rest() {
    const text = this.#text;
    this.#text = "";
    return text ? [{ text, cycle: null, token: null }] : [];
  }
}
