// The conversation: turns are sent, answers come as streams, and each of them can be stopped.

import { Answer } from "./answer.js";
import { copy, el } from "./dom.js";
import { count } from "./explain.js";

const EXAMPLES = [
  "I want to book a table for two in San Jose tonight.",
  "I would like to see a movie tonight.",
  "What is the weather in Paris tomorrow?",
];
const SHOW_MS = 40; // how often arrived text is shown
const FOLLOW_MS = 400; // how often the panel shows the newest cycle of an answer that is being written
const NEAR = 80; // pixels from the end of the page: then it follows the answer

export class Chat {
  #messages = [];
  #running = null; // the AbortController of the answer that is being written
  #arrived = []; // chunks that are not shown yet
  #followed = null; // when the panel was last brought to the newest cycle of this answer; null: it is not

  /** `parts`: the elements log, form, input, send, stop, clear and status. */
  constructor(parts, server, settings, inspector, model) {
    Object.assign(this, { ...parts, server, settings, inspector, model });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    this.input.addEventListener("input", () => this.#grow());
    this.stop.addEventListener("click", () => this.#running?.abort());
    document.addEventListener("keydown", (event) => this.#escape(event), { capture: true });
    this.clear.addEventListener("click", () => this.#clear());
    this.#clear();
  }

  #clear() {
    this.#running?.abort();
    this.inspector.close();
    this.#messages = [];
    const example = (text) => el("button", { type: "button", class: "example", onclick: () => ((this.input.value = text), this.#send()) }, text);
    this.log.replaceChildren(
      el("div", { class: "welcome" }, el("h2", {}, "Ask the model something"), el("div", {}, ...EXAMPLES.map(example))),
    );
    this.clear.disabled = true;
    this.input.focus();
  }

  #escape(event) {
    if (event.key !== "Escape" || !this.#running) return;
    this.#running.abort();
    event.preventDefault();
  }

  #grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 200)}px`;
  }

  #turn(title, ...children) {
    const turn = el("div", { class: "turn" }, el("h2", {}, title), ...children);
    this.log.append(turn);
    return turn;
  }

  async #send() {
    const text = this.input.value;
    if (!text.trim() || this.#running) return;
    if (this.settings.invalid) return this.#refuse(this.settings.invalid);
    if (!this.#messages.length) this.log.replaceChildren();
    this.clear.disabled = false;
    this.input.value = "";
    this.#grow();
    this.#turn("You", el("div", { class: "text" }, text)).classList.add("user");
    const messages = this.#messages; // others after Clear
    messages.push({ role: "user", content: text });
    const answer = new Answer((answer, at) => this.inspector.show(answer, at));
    const turn = this.#turn(this.model() || "Answer", answer.element);
    turn.scrollIntoView({ block: "nearest" });
    const wide = matchMedia("(min-width: 60.01rem) and (prefers-reduced-motion: no-preference)").matches;
    this.#followed = wide && (this.inspector.answer === null || this.inspector.following) ? 0 : null;
    await this.#receive(answer, turn, text);
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else messages.pop(); // no answer: the next turn does not repeat the question
  }

  #refuse(control) {
    control.closest("details").open = true;
    control.reportValidity();
  }

  async #receive(answer, turn, question) {
    const running = (this.#running = new AbortController());
    this.#busy(true, answer);
    const began = performance.now();
    const timer = setInterval(() => this.#show(answer), SHOW_MS);
    let finish = "";
    try {
      for await (const chunk of this.server.chat(this.#body(), running.signal)) {
        const choice = chunk.choices[0];
        if (choice) this.#arrived.push({ text: choice.delta.content ?? "", cycle: chunk.eyas?.cycle ?? null });
        finish = choice?.finish_reason ?? finish;
      }
      this.#finish(answer, timer);
      this.#end(answer, turn, finish, performance.now() - began);
    } catch (error) {
      this.#finish(answer, timer);
      if (error.name === "AbortError") this.#end(answer, turn, "stopped", performance.now() - began);
      else this.#fail(turn, error, question);
    } finally {
      this.#running = null;
      this.#busy(false, answer);
    }
  }

  #finish(answer, timer) {
    clearInterval(timer);
    this.#show(answer);
    answer.end();
  }

  #body() {
    const system = this.settings.system;
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#messages];
    return { model: this.model(), messages, stream: true, cycles: true, ...this.settings.body };
  }

  /** Add what has come since the last time, at once: laying out a long answer takes a while. */
  #show(answer) {
    const cycles = answer.cycles.length;
    const scroller = getComputedStyle(this.log).overflowY === "auto" ? this.log : document.scrollingElement;
    const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
    for (const { text, cycle } of this.#arrived.splice(0)) answer.add(text, cycle);
    if (atEnd) scroller.scrollTop = scroller.scrollHeight;
    if (answer.cycles.length > cycles) this.#follow(answer);
  }

  /** Show the newest cycle from time to time, until the reader chooses another one or closes the panel. */
  #follow(answer) {
    if (this.#followed === null || performance.now() - this.#followed < FOLLOW_MS) return;
    const left = this.#followed > 0 && !(this.inspector.answer === answer && this.inspector.following);
    this.#followed = left ? null : performance.now();
    if (!left) this.inspector.show(answer, answer.cycles.length - 1, true);
  }

  #end(answer, turn, finish, ms) {
    const cycles = answer.cycles.filter((cycle) => !cycle.prefill);
    const tokens = answer.cycles.reduce((sum, cycle) => sum + cycle.tokens.length, 0);
    const figures = [
      ...(tokens ? [count(tokens, "token"), count(cycles.length, "cycle")] : []),
      ...(cycles.length ? [`tau ${cycles.at(-1).tau_so_far.toFixed(2)}`] : []),
      `${(ms / 1000).toFixed(2)} s`,
      ...({ stopped: ["stopped"], length: ["cut at the length asked for"] }[finish] ?? []),
    ];
    const copied = el("button", { type: "button", class: "plain", onclick: () => this.#copy(copied, answer) }, "Copy");
    turn.append(el("p", { class: "quiet figures" }, el("span", {}, figures.join(" \u00b7 ")), copied));
    if (this.inspector.answer === answer) this.inspector.show(answer, this.inspector.at, this.inspector.following); // of how many
    this.status.textContent = `${finish === "stopped" ? "Answer stopped" : "Answer complete"}: ${figures.slice(0, 2).join(", ")}.`;
  }

  async #copy(button, answer) {
    button.textContent = (await copy(answer.text)) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  #fail(turn, error, question) {
    const where = error.status === 401 ? " Write the server's key into the field API key." : "";
    turn.append(el("p", { class: "bad", role: "alert" }, (error.message || String(error)) + where));
    if (error.status === 401) {
      this.settings.form.closest("details").open = true;
      this.settings.form.elements.key.focus();
    }
    if (!this.input.value && !turn.querySelector(".answer").textContent) this.input.value = question;
    this.#grow();
  }

  #busy(busy, answer) {
    const free = [document.body, this.input, this.send, this.stop].includes(document.activeElement); // else the reader is elsewhere
    answer.element.setAttribute("aria-busy", busy);
    answer.element.classList.toggle("writing", busy);
    this.send.hidden = busy;
    this.stop.hidden = !busy;
    if (busy) this.status.textContent = "The model is answering.";
    if (free) (busy ? this.stop : this.input).focus({ preventScroll: true });
  }
}
