// A message of the conversation, and the function that streams a response into a message.

import { ApiError, postStream } from "./api.js";
import { TokenGroups } from "./tokens.js";

const MIN_RATE_SECONDS = 0.05; // minimum duration for a token rate; a shorter stream arrives in a single read

export class Message {
  constructor(role, text = "", fields = {}) {
    this.role = role; // user, assistant, tool
    this.text = text;
    this.images = []; // data: URLs
    this.reasoning = "";
    this.calls = []; // {id, name, arguments}
    this.callId = null; // for a tool message: the id of the call that it answers
    this.tokens = new TokenGroups();
    this.numbers = null; // times and token counts, see Receiver
    this.error = null;
    this.isLive = false; // whether the response is still arriving
    Object.assign(this, fields);
  }

  /** Whether this is a message of the assistant without text, reasoning and calls. */
  get isEmpty() {
    return this.role === "assistant" && !this.text && !this.reasoning && !this.calls.length;
  }

  /** Replaces the text. Clears the token probabilities, `numbers` and the error, which belong to the old text. */
  edit(text) {
    this.text = text;
    this.tokens = new TokenGroups();
    this.numbers = null;
    this.error = null;
  }

  /** Returns the content for a request: the text, or an array of parts if the message has images. */
  _content() {
    if (!this.images.length) return this.text;
    const images = this.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return this.text ? [...images, { type: "text", text: this.text }] : images;
  }

  /** Returns the message in the format of requests. */
  toRequest() {
    if (this.role === "tool") return { role: "tool", content: this.text, tool_call_id: this.callId };
    const message = { role: this.role, content: this._content() };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) {
      message.tool_calls = this.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    return message;
  }
}

/** Adds the chunks of one response to a message and measures times and token counts. */
export class Receiver {
  constructor(message, clock = () => performance.now()) {
    this._message = message;
    this._clock = clock;
    this._sentAt = clock();
    this._firstTokenAt = null;
    this._numFirstTokens = 0;
    this._lastTokenAt = null;
    this._usage = null;
    this._finishReason = null;
  }

  /** Adds a chunk of the stream. */
  addChunk(chunk) {
    const usage = chunk.usage ?? null;
    if (usage) this._usage = usage;
    const choice = chunk.choices[0];
    if (choice) {
      const { delta, logprobs } = choice;
      const message = this._message;
      message.text += delta.content ?? "";
      message.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
      for (const part of delta.tool_calls ?? []) this._addCall(part);
      if (logprobs?.content) message.tokens.push(logprobs.content);
      this._finishReason = choice.finish_reason ?? this._finishReason;
      const isText = delta.content || delta.reasoning_content || delta.reasoning;
      const hasOutput = isText || delta.tool_calls || logprobs?.content?.length;
      if (hasOutput) {
        this._lastTokenAt = this._clock();
        if (this._firstTokenAt === null) {
          this._firstTokenAt = this._lastTokenAt;
          this._numFirstTokens = usage?.completion_tokens ?? 0;
        }
      }
    }
    this._message.numbers = this._numbers();
  }

  /** Ends the message. `reason` is "stopped" or "error"; null if the stream is complete. */
  end(reason = null) {
    this._finishReason = reason ?? this._finishReason;
    this._message.tokens.end();
    this._message.numbers = this._numbers();
    this._message.isLive = false;
  }

  _addCall({ index, id, function: part }) {
    const calls = this._message.calls;
    calls[index] ??= { id, name: part.name ?? "", arguments: "" };
    calls[index].arguments += part.arguments ?? "";
  }

  _numbers() {
    const usage = this._usage;
    const seconds = this._firstTokenAt === null ? 0 : (this._lastTokenAt - this._firstTokenAt) / 1000;
    const numLaterTokens = (usage?.completion_tokens ?? 0) - this._numFirstTokens;
    return {
      firstToken: this._firstTokenAt === null ? null : (this._firstTokenAt - this._sentAt) / 1000,
      perSecond: seconds >= MIN_RATE_SECONDS && numLaterTokens > 0 ? numLaterTokens / seconds : null,
      prompt: usage?.prompt_tokens ?? null,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
      completion: usage?.completion_tokens ?? null,
      finish: this._finishReason,
    };
  }
}

/**
 * Requests a response and adds its chunks to a message. Calls `onchunk` after each chunk. Returns when the response has
 * ended, and stores an error in `message.error`. If `signal` aborts the response, the message keeps its text without an
 * error.
 */
export async function streamInto(message, request, signal, onchunk) {
  const receiver = new Receiver(message);
  // The usage is in each chunk, so that an aborted response also has token counts.
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  try {
    for await (const chunk of postStream("v1/chat/completions", { ...request, ...options }, signal)) {
      receiver.addChunk(chunk);
      onchunk();
    }
    receiver.end();
  } catch (error) {
    receiver.end(signal.aborted ? "stopped" : "error");
    if (signal.aborted) return;
    if (!(error instanceof ApiError)) console.error(error);
    message.error = error;
  }
}
