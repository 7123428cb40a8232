// Texts that know where they come from.

import { el } from "./dom.js";

/** A part of a source, with the place of each of its characters there: what is left of a quote, say, without its marks. */
export class Piece {
  constructor(text, places) {
    [this.text, this.places] = [text, places];
  }

  static of(text, from) {
    return new Piece(text, Array.from({ length: text.length }, (_, i) => from + i));
  }

  static join(pieces) {
    return new Piece(pieces.map(({ text }) => text).join(""), pieces.flatMap(({ places }) => places));
  }

  slice(from, to = this.text.length) {
    return new Piece(this.text.slice(from, to), this.places.slice(from, to));
  }

  trim() {
    const from = this.text.length - this.text.trimStart().length;
    return this.slice(from, Math.max(from, this.text.trimEnd().length));
  }

  /** The lines, each with its end. */
  lines() {
    let at = 0;
    return (this.text.match(/[^\n]*\n|[^\n]+$/g) ?? []).map((line) => this.slice(at, (at += line.length)));
  }
}

/**
 * A text's lines as they are written, as [{ at, element }]: `at` is the place where a line begins, counted from `from`, the place of the
 * text itself. `leaf(piece)` returns the nodes of a piece.
 */
export function asWritten(text, from, leaf) {
  return Piece.of(text, from).lines().map((line) => ({ at: line.places[0], element: el("span", {}, ...leaf(line)) }));
}
