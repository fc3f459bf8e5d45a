// The conversations that the browser keeps in localStorage: last saved first, at most MAX_CONVERSATIONS.

import { Message } from "./answer.js";

const STORAGE_NAME = "penstock.conversations";
const MAX_CONVERSATIONS = 100;
const MAX_TITLE_LENGTH = 60;

/** The stored conversations. */
export class Conversations {
  constructor(storage = globalThis.localStorage) {
    this._storage = storage;
    this.current = null; // the id of the conversation on the page; null before its first message
  }

  /** Returns all conversations: {id, title, messages}, the last saved first. */
  get all() {
    try {
      const list = JSON.parse(this._storage.getItem(STORAGE_NAME) ?? "[]");
      return Array.isArray(list) ? list : [];
    } catch {
      return [];
    }
  }

  /** Stores the messages of the current conversation. Deletes the conversation if there are no messages. */
  save(messages) {
    if (!messages.length) {
      if (this.current !== null) this.remove(this.current);
      return;
    }
    this.current ??= crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
    const firstText = messages.find((message) => message.role === "user")?.text ?? "";
    const title = firstText.trim().replace(/\s+/g, " ").slice(0, MAX_TITLE_LENGTH) || "Without text";
    const conversation = { id: this.current, title, messages: messages.map(storedFields) };
    const otherConversations = this.all.filter((other) => other.id !== this.current);
    this._write([conversation, ...otherConversations].slice(0, MAX_CONVERSATIONS));
  }

  /** Makes a stored conversation the current conversation and returns its messages; null if `id` is unknown. */
  open(id) {
    const conversation = this.all.find((stored) => stored.id === id);
    if (!conversation) return null;
    this.current = id;
    return conversation.messages.map(messageOf);
  }

  /** Begins a new conversation. The first call of `save` with a message stores the conversation. */
  begin() {
    this.current = null;
  }

  remove(id) {
    if (this.current === id) this.current = null;
    this._write(this.all.filter((conversation) => conversation.id !== id));
  }

  /** Writes the list. Drops the least recently saved conversations until the list fits into the browser's quota. */
  _write(list) {
    for (let count = list.length; count >= 0; count -= 1) {
      try {
        this._storage.setItem(STORAGE_NAME, JSON.stringify(list.slice(0, count)));
        return;
      } catch (error) {
        if (error.name !== "QuotaExceededError") throw error;
      }
    }
  }
}

function storedFields({ role, text, images, reasoning, calls, callId, numbers }) {
  return { role, text, images, reasoning, calls, callId, numbers };
}

const messageOf = ({ role, text, ...more }) => new Message(role, text, more);
