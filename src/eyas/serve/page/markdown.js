// Markdown as elements: paragraphs, headings, lists, quotes, fenced code, tables and rules; code, bold, italics, struck text and links.
//
// Nothing becomes markup: what is not known here stays text, HTML too, and links lead to http, https and mail addresses only. The text goes
// in through `leaf(piece)`, which returns nodes: it knows the place of each character in the source, so an answer can show its tokens.
// What is matched by trying has a greatest length, so that no text takes long.

import { copyButton, el } from "./dom.js";
import { Piece } from "./piece.js";

const DEEPEST = 12; // quotes and lists within each other, and marks within each other
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)(?:[-*+]|(\d{1,3})[.)]) {1,4}(?=\S)/; // four digits are rather a year
const COLUMNS = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;

const INLINE = new RegExp(
  [
    /\\(?<escaped>[`*_~#|>+.!-])/,
    /(?<!`)(?<ticks>`+)(?!`)(?<code>[^]{1,500}?)(?<!`)\k<ticks>(?!`)/,
    /!?\[(?<label>[^[\]]{1,500})\]\(<?(?<href>(?:https?:\/\/|mailto:)(?:[^\s()<>]|\([^\s()<>]{0,500}\)){1,2000})>?(?: "[^"\n]{0,500}")?\)/,
    /(?<url>https?:\/\/[^\s<>"`]{0,2000}[^\s<>"`'*_~.,;:!?)\]])/,
    /\*\*(?!\s)(?<strong>[^]{1,400}?)(?<!\s)\*\*(?!\*)/,
    /(?<!\w)__(?!\s)(?<bold>[^]{1,400}?)(?<!\s)__(?!\w)/,
    /\*(?![\s*])(?<em>(?:[^*]|\*\*[^*]{1,500}\*\*){1,400}?)(?<!\s)\*(?!\*)/,
    /(?<!\w)_(?![\s_])(?<italic>[^_]{1,400}?)(?<!\s)_(?!\w)/,
    /~~(?!\s)(?<struck>[^]{1,400}?)(?<!\s)~~/,
  ]
    .map((part) => part.source)
    .join("|"),
  "dg",
);
const TAGS = { strong: "strong", bold: "strong", em: "em", italic: "em", struck: "s" };

/** The blocks of a text, as [{ at, element }]: `at` is the place where a block begins, counted from `from`, the place of the text itself. */
export function markdown(text, from, leaf) {
  return blocks(Piece.of(text, from).lines(), leaf, 0);
}

const bare = (line) => line.text.replace(/\n$/, "");
const blank = (line) => !line || !line.text.trim();

function blocks(lines, leaf, depth) {
  const made = [];
  for (let n = 0; n < lines.length; ) {
    if (blank(lines[n])) {
      n++;
      continue;
    }
    const read = (depth < DEEPEST && READERS.find((reader) => reader.begins(lines[n], lines[n + 1]))) || PARAGRAPH;
    const { element, end } = read.block(lines, n, leaf, depth);
    made.push({ at: lines[n].places[0], element });
    n = end;
  }
  return made;
}

const elements = (lines, leaf, depth) => blocks(lines, leaf, depth + 1).map(({ element }) => element);

const CODE = {
  begins: (line) => FENCE.test(bare(line)),
  block(lines, n, leaf) {
    const [, mark, language] = FENCE.exec(bare(lines[n]));
    const closes = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \t]*$`);
    let end = n + 1;
    while (end < lines.length && !closes.test(bare(lines[end]))) end++;
    const code = Piece.join(lines.slice(n + 1, end));
    const head = el("figcaption", {}, el("span", {}, language || "code"), copyButton("Copy code", () => code.text));
    return { element: el("figure", { class: "code" }, head, el("pre", {}, el("code", {}, ...leaf(code)))), end: end + 1 };
  },
};

const TITLE = {
  begins: (line) => HEADING.test(bare(line)),
  block(lines, n, leaf) {
    const [all, marks] = HEADING.exec(bare(lines[n]));
    const level = Math.min(6, marks.length + 2); // below the page's own headings
    return { element: el(`h${level}`, {}, ...inline(lines[n].slice(all.length).trim(), leaf)), end: n + 1 };
  },
};

const LINE = { begins: (line) => RULE.test(bare(line)), block: (lines, n) => ({ element: el("hr"), end: n + 1 }) };

const QUOTED = {
  begins: (line) => QUOTE.test(line.text),
  block(lines, n, leaf, depth) {
    let end = n;
    while (end < lines.length && QUOTED.begins(lines[end])) end++;
    const inner = lines.slice(n, end).map((line) => line.slice(QUOTE.exec(line.text)[0].length));
    return { element: el("blockquote", {}, ...elements(inner, leaf, depth)), end };
  },
};

const LIST = {
  begins: (line) => ITEM.test(bare(line)),
  block(lines, n, leaf, depth) {
    const [, spaces, first] = ITEM.exec(bare(lines[n]));
    const belongs = (line) => /^ */.exec(line.text)[0].length >= spaces.length + 2;
    const another = (line) => LIST.begins(line) && !LINE.begins(line) && (ITEM.exec(bare(line))[2] === undefined) === (first === undefined);
    const items = [];
    let end = n;
    while (end < lines.length) {
      const line = lines[end];
      if (!items.length || (!blank(line) && !belongs(line) && another(line))) {
        items.push([line.slice(ITEM.exec(bare(line))[0].length)]);
      } else if (blank(line) || belongs(line) || (!blank(lines[end - 1]) && !interrupts(line, lines[end + 1]))) {
        const indent = /^ */.exec(line.text)[0].length;
        items.at(-1).push(line.slice(Math.min(indent, ITEM.exec(bare(lines[n]))[0].length)));
      } else break;
      end++;
    }
    const list = first === undefined ? el("ul") : el("ol", { start: first === "1" ? null : first });
    list.append(...items.map((item) => el("li", {}, ...elements(item, leaf, depth))));
    return { element: list, end };
  },
};

const TABLE = {
  begins: (line, next) => line.text.includes("|") && next !== undefined && next.text.includes("|") && COLUMNS.test(next.text.trim()),
  block(lines, n, leaf) {
    const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...inline(cell, leaf))));
    let end = n + 2;
    while (end < lines.length && lines[end].text.includes("|")) end++;
    const body = lines.slice(n + 2, end).map((line) => row(line, "td"));
    return { element: el("table", {}, el("thead", {}, row(lines[n], "th")), el("tbody", {}, ...body)), end };
  },
};

function cells(line) {
  const whole = line.trim();
  const cut = [...whole.text.matchAll(/(?<!\\)\|/g)].map(({ index }) => index);
  const edges = [-1, ...cut, whole.text.length];
  const parts = edges.slice(1).map((edge, i) => whole.slice(edges[i] + 1, edge).trim());
  return parts.slice(whole.text.startsWith("|") ? 1 : 0, cut.at(-1) === whole.text.length - 1 ? -1 : undefined);
}

const READERS = [CODE, TITLE, LINE, QUOTED, LIST, TABLE];

/** Whether a line ends the paragraph before it. */
function interrupts(line, next) {
  const reader = READERS.find((one) => one.begins(line, next));
  return reader === LIST ? ["1", undefined].includes(ITEM.exec(bare(line))[2]) : reader !== undefined;
}

const PARAGRAPH = {
  block(lines, n, leaf) {
    let end = n + 1;
    while (end < lines.length && !blank(lines[end]) && !interrupts(lines[end], lines[end + 1])) end++;
    return { element: el("p", {}, ...inline(Piece.join(lines.slice(n, end)).trim(), leaf)), end };
  },
};

/** The nodes of a piece without blocks. */
function inline(piece, leaf, depth = 0) {
  const nodes = [];
  let done = 0;
  for (const match of depth < DEEPEST ? piece.text.matchAll(INLINE) : []) {
    const part = (name) => piece.slice(...match.indices.groups[name]);
    const inner = (name) => inline(part(name), leaf, depth + 1);
    const { escaped, code, href, url } = match.groups;
    const mark = Object.keys(TAGS).find((name) => match.groups[name] !== undefined);
    nodes.push(...leaf(piece.slice(done, match.index)));
    if (escaped) nodes.push(...leaf(part("escaped")));
    else if (code) nodes.push(el("code", {}, ...leaf(part("code"))));
    else if (href) nodes.push(link(href, inner("label")));
    else if (url) nodes.push(link(url, leaf(part("url"))));
    else nodes.push(el(TAGS[mark], {}, ...inner(mark)));
    done = match.index + match[0].length;
  }
  return [...nodes, ...leaf(piece.slice(done))];
}

function link(address, children) {
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...children);
}
