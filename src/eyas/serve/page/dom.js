// Elements by hand. Whatever a model or a user wrote goes in as a text node, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const COPIED_MS = 1500;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element: `el("p", { class: "quiet", onclick: f, "--depth": 3 }, "text", child)`. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A token as it is shown by itself: spaces at its ends and line breaks are made visible. */
export function visible(text, most = Infinity) {
  if (text === "") return "(empty)";
  const shown = text
    .replace(/^ +| +$/g, (spaces) => "\u00b7".repeat(spaces.length))
    .replace(/\n/g, "\u21b5")
    .replace(/\t/g, "\u21e5");
  const letters = [...shown];
  return letters.length > most ? letters.slice(0, most - 1).join("") + "\u2026" : shown;
}

/** A token in a sentence. */
export function chip(text) {
  return el("code", { class: "chip" }, visible(text));
}

/** Copy text; resolves to whether that worked. Pages without TLS have no clipboard but this one. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** A button that copies `text()` and says so for a moment. */
export function copyButton(name, text) {
  const copied = async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = name), COPIED_MS);
  };
  const button = el("button", { type: "button", class: "plain", onclick: copied }, name);
  return button;
}

/** Let the browser save a text as a file. */
export function saveFile(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  el("a", { href: address, download: name.replace(/[\\/:*?"<>|\x00-\x1f]/g, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
