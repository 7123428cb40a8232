// The elements of a conversation's turns, with what can be done with them.

import { copyButton, el } from "./dom.js";

function action(name, onclick) {
  return el("button", { type: "button", class: "plain", onclick }, name);
}

/** Let Enter send a text area's form, where Shift+Enter begins a new line. */
export function sendByEnter(area) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    area.form.requestSubmit();
  });
}

/** A question. `onEdited(text)` is called with what is to be asked in its place. */
export function userTurn(text, onEdited) {
  const edit = action("Edit", () => {
    shown.replaceWith(form);
    actions.hidden = true;
    area.focus();
  });
  const back = () => {
    form.replaceWith(shown);
    actions.hidden = false;
    edit.focus();
  };
  const area = el("textarea", { rows: Math.min(12, text.split("\n").length + 1), "aria-label": "Edited message" });
  area.value = text;
  const buttons = el("div", { class: "buttons" }, el("button", { class: "main" }, "Send edited"), el("button", { type: "button", onclick: back }, "Cancel"));
  const form = el("form", { class: "edit" }, area, buttons);
  sendByEnter(area);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onEdited(area.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return; // taken by an answer that is being written
    event.preventDefault();
    back();
  });
  const shown = el("div", { class: "text" }, text);
  const actions = el("p", { class: "quiet actions" }, copyButton("Copy", () => text), edit);
  return el("div", { class: "turn user" }, el("h2", {}, "You"), shown, actions);
}

/** An answer; `closeTurn` ends it. */
export function answerTurn({ model, answer }) {
  return el("div", { class: "turn" }, el("h2", {}, model || "Answer"), answer.element);
}

/** What stands below an answer that is complete. `onAgain` is called to have it written anew, which the last one offers. */
export function closeTurn(turn, { content, figures }, onAgain) {
  const again = action("Regenerate", onAgain);
  again.classList.add("again");
  turn.append(el("p", { class: "quiet figures" }, el("span", {}, figures ?? ""), copyButton("Copy", () => content), again));
}
