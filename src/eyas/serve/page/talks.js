// The conversations, kept in this browser, each under a name of its own, so that two tabs do not overwrite one another. Texts are kept for
// the next visit, the cycles behind their tokens until the page is left.

import { keep, kept, keptNames, keptObject } from "./keep.js";

const PREFIX = "eyas.talk.";
const CURRENT = "eyas.talk"; // in this tab
const MOST = 50; // conversations
const ROOM = 2_000_000; // characters of them all; browsers give a page about five million
const TITLE = 60; // letters

const sized = (talk) => talk.messages.reduce((sum, { content }) => sum + content.length, 0);
const written = (talk) => talk.messages.filter(({ content }) => content); // an answer that has no text yet is none
const sound = (talk) =>
  Array.isArray(talk?.messages) &&
  talk.messages.every((message) => ["user", "assistant"].includes(message?.role) && typeof message.content === "string");

/** A conversation: { id, at, system, messages: [{ role, content, model, figures, answer }] }; `at` is the time of its last change. */
export function newTalk(messages = []) {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), at: Date.now(), system: "", messages };
}

/** The first words of a conversation. */
export function titleOf(talk) {
  const letters = [...(talk.messages[0]?.content ?? "").trim().replace(/\s+/g, " ")];
  return letters.length > TITLE ? `${letters.slice(0, TITLE - 1).join("")}\u2026` : letters.join("") || "New conversation";
}

export class Talks {
  #shown = new Map(); // those of this visit, with their answers

  /** All conversations, the newest first. */
  list() {
    const stored = keptNames("localStorage", PREFIX).map((name) => this.#read(name.slice(PREFIX.length)));
    const others = stored.filter((talk) => talk && !this.#shown.has(talk.id));
    return [...this.#shown.values(), ...others].sort((a, b) => b.at - a.at);
  }

  #read(id) {
    const talk = keptObject("localStorage", PREFIX + id);
    return sound(talk) ? { system: "", ...talk, at: Number(talk.at) || 0, id } : null;
  }

  /** The conversation of that name; a new one where there is none. */
  open(id) {
    const talk = this.#shown.get(id) ?? this.#read(id) ?? newTalk();
    keep("sessionStorage", CURRENT, talk.id);
    return talk;
  }

  /** The conversation that this tab had before it was loaded again. */
  last() {
    return this.open(kept("sessionStorage", CURRENT));
  }

  /** Whether a conversation is one of this visit, and not deleted. */
  knows(talk) {
    return this.#shown.has(talk.id);
  }

  /** Keep a conversation; the oldest others go where there is no room. Return whether it is kept for the next visit. */
  save(talk) {
    if (!talk.messages.length) return this.remove(talk.id);
    talk.at = Date.now();
    this.#shown.set(talk.id, talk);
    keep("sessionStorage", CURRENT, talk.id);
    const text = JSON.stringify({ ...talk, messages: written(talk).map(({ answer, ...message }) => message) });
    if (text.length > ROOM) return false;
    const others = this.list().filter(({ id }) => id !== talk.id);
    let room = ROOM - text.length;
    others.forEach((other, place) => {
      room -= sized(other);
      if (room < 0 || place + 1 >= MOST) this.remove(other.id);
    });
    while (!keep("localStorage", PREFIX + talk.id, text)) {
      const oldest = others.filter(({ id }) => kept("localStorage", PREFIX + id) !== null).at(-1);
      if (!oldest) return false;
      this.remove(oldest.id);
    }
    return true;
  }

  remove(id) {
    this.#shown.delete(id);
    return keep("localStorage", PREFIX + id, null);
  }
}

/** A conversation as JSON, in the form that requests and training data have. */
export function asJson(talk) {
  const system = talk.system ? [{ role: "system", content: talk.system }] : [];
  const turns = written(talk).map(({ role, content }) => ({ role, content }));
  return JSON.stringify({ messages: [...system, ...turns] }, null, 2) + "\n";
}

/** A conversation as Markdown. */
export function asMarkdown(talk) {
  const system = talk.system ? [["System", talk.system]] : [];
  const turns = written(talk).map(({ role, content, model }) => [role === "user" ? "You" : model || "Answer", content]);
  return [`# ${titleOf(talk)}\n`, ...[...system, ...turns].map(([who, text]) => `## ${who}\n\n${text}\n`)].join("\n");
}
