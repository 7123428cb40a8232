// The conversation: turns are sent, answers come as streams, and each of them can be stopped.

import { Answer } from "./answer.js";
import { Bar } from "./bar.js";
import { el } from "./dom.js";
import { count } from "./explain.js";
import { markdown } from "./markdown.js";
import { asWritten } from "./piece.js";
import { newTalk } from "./talks.js";
import { answerTurn, closeTurn, sendByEnter, userTurn } from "./turns.js";

const EXAMPLES = [
  "I want to book a table for two in San Jose tonight.",
  "I would like to see a movie tonight.",
  "What is the weather in Paris tomorrow?",
];
const SHOW_MS = 40; // how often arrived text is shown
const FOLLOW_MS = 400; // how often the panel shows the newest cycle of an answer that is being written
const NEAR = 80; // pixels from the end of the page: then it follows the answer

export class Chat {
  #talk; // the conversation that is shown
  #running = null; // the AbortController of the answer that is being written
  #arrived = []; // chunks that are not shown yet
  #left = false; // the page is being left, which ends answers like a lost connection
  #followed = null; // when the panel was last brought to the newest cycle of this answer; null: it is not

  /** `parts`: the elements log, composer, input, send, stop and status; `bar`: those of the Bar. */
  constructor(parts, bar, server, settings, inspector, talks, model) {
    Object.assign(this, { ...parts, server, settings, inspector, talks, model });
    this.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#say(this.input.value, this.#talk.messages.length);
    });
    sendByEnter(this.input);
    this.input.addEventListener("input", () => this.#grow());
    this.stop.addEventListener("click", () => this.#running?.abort());
    document.addEventListener("keydown", (event) => this.#escape(event), { capture: true });
    settings.form.addEventListener("change", () => this.#format());
    settings.form.addEventListener("reset", () => setTimeout(() => this.#format()));
    addEventListener("pagehide", () => this.#leave());
    addEventListener("pageshow", () => (this.#left = false));
    this.bar = new Bar(bar, talks, (talk) => this.#open(talk));
    this.#open(talks.last());
  }

  #open(talk) {
    this.#running?.abort();
    this.inspector.close();
    this.#talk = talk;
    if (talk.messages.at(-1)?.role === "user") this.input.value = talk.messages.pop().content; // it was left before its answer came
    this.#draw();
    this.bar.show(talk);
    this.#grow();
    this.input.focus();
  }

  #leave() {
    if (this.#running) this.talks.save(this.#talk);
    this.#left = true;
  }

  #draw() {
    const turns = this.#talk.messages.map((message, at) => {
      if (message.role === "user") return userTurn(message.content, (text) => this.#say(text, at));
      message.answer ??= this.#kept(message.content);
      message.answer.format = this.#formatted();
      const turn = answerTurn(message);
      if (message.content) closeTurn(turn, message, () => this.#again());
      return turn;
    });
    this.log.replaceChildren(...(turns.length ? turns : [this.#welcome()]));
  }

  #welcome() {
    const example = (text) => el("button", { type: "button", class: "example", onclick: () => this.#say(text, 0) }, text);
    return el("div", { class: "welcome" }, el("h2", {}, "Ask the model something"), el("div", {}, ...EXAMPLES.map(example)));
  }

  #answer() {
    return new Answer((answer, at) => this.inspector.show(answer, at), this.#formatted());
  }

  /** An answer of an earlier visit: its cycles are gone. */
  #kept(text) {
    const answer = this.#answer();
    answer.add(text, null);
    answer.end();
    return answer;
  }

  #formatted() {
    return this.settings.markdown ? markdown : asWritten;
  }

  #format() {
    for (const { answer } of this.#talk.messages) if (answer) answer.format = this.#formatted();
  }

  #escape(event) {
    if (event.key !== "Escape") return;
    if (!this.bar.close()) {
      if (!this.#running) return;
      this.#running.abort();
    }
    event.preventDefault();
  }

  #grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 200)}px`;
  }

  #again() {
    const { messages } = this.#talk;
    this.#say(messages.at(-2).content, messages.length - 2);
  }

  /** Ask, after the first `kept` messages. What else follows them stays in a conversation of its own, but for one answer and its question. */
  async #say(text, kept) {
    if (!text.trim() || this.#running) return;
    if (this.settings.invalid) return this.#refuse(this.settings.invalid);
    if (kept + 2 < this.#talk.messages.length) this.#talk = newTalk(this.#talk.messages.slice(0, kept));
    const talk = this.#talk;
    const message = { role: "assistant", content: "", model: this.model(), answer: this.#answer() };
    const replaced = talk.messages.splice(kept, 2, { role: "user", content: text }, message);
    talk.system = this.settings.system;
    this.#save(talk);
    if (this.input.value === text) this.input.value = "";
    this.#grow();
    if (replaced.some(({ answer }) => answer && answer === this.inspector.answer)) this.inspector.close();
    this.#draw();
    const turn = this.log.lastElementChild;
    this.#toEnd();
    const wide = matchMedia("(min-width: 60.01rem) and (prefers-reduced-motion: no-preference)").matches;
    this.#followed = wide && (this.inspector.answer === null || this.inspector.following) ? 0 : null;
    const failed = await this.#receive(message, turn);
    if (this.#left || !this.talks.knows(talk)) return; // or deleted
    if (!message.content) talk.messages.splice(kept, 2, ...replaced); // no answer: the next turn does not repeat the question
    this.#save(talk);
    if (message.content || talk !== this.#talk) return;
    if (replaced.length) {
      this.#draw();
      this.log.lastElementChild.append(...turn.querySelectorAll("[role=alert]"));
    }
    if (failed && !this.input.value && replaced[0]?.content !== text) this.input.value = text;
    this.#grow();
  }

  #save(talk) {
    const kept = this.talks.save(talk);
    if (talk === this.#talk) this.bar.show(talk, kept);
  }

  #refuse(control) {
    control.closest("details").open = true;
    control.reportValidity();
  }

  /** Receive an answer; return whether it failed or was stopped. */
  async #receive(message, turn) {
    const { answer } = message;
    const running = (this.#running = new AbortController());
    this.#busy(true, answer);
    const began = performance.now();
    const timer = setInterval(() => this.#show(message), SHOW_MS);
    let [finish, problem] = ["", null];
    try {
      for await (const chunk of this.server.chat(this.#body(), running.signal)) {
        const choice = chunk.choices[0];
        if (choice) this.#arrived.push({ text: choice.delta.content ?? "", cycle: chunk.eyas?.cycle ?? null });
        finish = choice?.finish_reason ?? finish;
      }
    } catch (error) {
      if (error.name === "AbortError") finish = "stopped";
      else problem = error;
    }
    clearInterval(timer);
    this.#show(message);
    answer.end();
    if (problem) this.#fail(turn, problem);
    else this.#end(message, turn, finish, performance.now() - began);
    this.#running = null;
    this.#busy(false, answer);
    return problem !== null || finish === "stopped";
  }

  #body() {
    const { messages, system } = this.#talk;
    const turns = messages.slice(0, -1).map(({ role, content }) => ({ role, content }));
    const all = [...(system ? [{ role: "system", content: system }] : []), ...turns];
    return { model: this.model(), messages: all, stream: true, cycles: true, ...this.settings.body };
  }

  /** Add what has come since the last time, at once: laying out a long answer takes a while. */
  #show(message) {
    const { answer } = message;
    const cycles = answer.cycles.length;
    const arrived = this.#arrived.splice(0);
    if (!arrived.length) return;
    this.#atEnd(() => {
      for (const { text, cycle } of arrived) answer.add(text, cycle);
      answer.draw();
    });
    message.content = answer.text;
    if (answer.cycles.length > cycles) this.#follow(answer);
  }

  /** Make the conversation longer; its end stays in view if it was. */
  #atEnd(grow) {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    grow();
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#toEnd();
  }

  #toEnd() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  /** What scrolls: the conversation, or on narrow screens the page, whose lower edge lies under the composer. */
  get #scroller() {
    return getComputedStyle(this.log).overflowY === "auto" ? this.log : document.scrollingElement;
  }

  /** Show the newest cycle from time to time, until the reader chooses another one or closes the panel. */
  #follow(answer) {
    if (this.#followed === null || performance.now() - this.#followed < FOLLOW_MS) return;
    const left = this.#followed > 0 && !(this.inspector.answer === answer && this.inspector.following);
    this.#followed = left ? null : performance.now();
    if (!left) this.inspector.show(answer, answer.cycles.length - 1, true);
  }

  #end(message, turn, finish, ms) {
    const { answer } = message;
    const cycles = answer.cycles.filter((cycle) => !cycle.prefill);
    const tokens = answer.cycles.reduce((sum, cycle) => sum + cycle.tokens.length, 0);
    const figures = [
      ...(tokens ? [count(tokens, "token"), count(cycles.length, "cycle")] : []),
      ...(cycles.length ? [`tau ${cycles.at(-1).tau_so_far.toFixed(2)}`] : []),
      `${(ms / 1000).toFixed(2)} s`,
      ...({ stopped: ["stopped"], length: ["cut at the length asked for"] }[finish] ?? []),
    ];
    message.figures = figures.join(" · ");
    this.#atEnd(() => closeTurn(turn, message, () => this.#again()));
    const { at, following } = this.inspector;
    if (this.inspector.answer === answer) this.inspector.show(answer, following ? answer.cycles.length - 1 : at, following);
    this.status.textContent = `${finish === "stopped" ? "Answer stopped" : "Answer complete"}: ${figures.slice(0, 2).join(", ")}.`;
  }

  #fail(turn, error) {
    const where = error.status === 401 ? " Write the server's key into the field API key." : "";
    turn.append(el("p", { class: "bad", role: "alert" }, (error.message || String(error)) + where));
    if (error.status !== 401) return;
    this.settings.form.closest("details").open = true;
    this.settings.form.elements.key.focus();
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
