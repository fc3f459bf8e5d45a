// The page of a speech model: a text, a player that starts with the first audio, and the waveform.

import { ApiError, getJson, postBytes } from "./api.js";
import { byId, make } from "./dom.js";

const HEADER_SIZE = 44; // bytes of a WAV header for 16-bit samples
const NUM_BARS = 240;
const EXAMPLE_TEXT = "A penstock is a pipe that carries water to a turbine.";

/** Returns the sample rate in a WAV header. */
export const sampleRateOf = (header) => new DataView(header.buffer, header.byteOffset).getUint32(24, true);

/** Decodes a WAV stream with one channel of 16-bit samples. Chunks can end inside the header or a sample. */
export class WavDecoder {
  constructor() {
    this._incompleteBytes = new Uint8Array(0);
    this.sampleRate = 0; // samples per second; 0 until the header has arrived
  }

  /** Adds bytes of the stream and returns the samples that are now complete, from -1 to 1. */
  add(bytes) {
    let streamBytes = new Uint8Array(this._incompleteBytes.length + bytes.length);
    streamBytes.set(this._incompleteBytes);
    streamBytes.set(bytes, this._incompleteBytes.length);
    if (!this.sampleRate) {
      if (streamBytes.length < HEADER_SIZE) return this._storeIncomplete(streamBytes, new Float32Array(0));
      this.sampleRate = sampleRateOf(streamBytes);
      streamBytes = streamBytes.slice(HEADER_SIZE);
    }
    const numSamples = streamBytes.length >> 1;
    const view = new DataView(streamBytes.buffer, streamBytes.byteOffset);
    const samples = Float32Array.from({ length: numSamples }, (_, i) => view.getInt16(2 * i, true) / 32768);
    return this._storeIncomplete(streamBytes.slice(2 * numSamples), samples);
  }

  _storeIncomplete(incompleteBytes, samples) {
    this._incompleteBytes = incompleteBytes;
    return samples;
  }
}

/** Divides the samples into `numParts` equal parts and returns the largest absolute sample of each part. */
export function peaks(chunks, numParts) {
  const total = chunks.reduce((sum, chunk) => sum + chunk.length, 0);
  const largest = new Array(numParts).fill(0);
  let index = 0;
  for (const chunk of chunks) {
    for (const sample of chunk) {
      const part = Math.floor((index++ * numParts) / total);
      largest[part] = Math.max(largest[part], Math.abs(sample));
    }
  }
  return largest;
}

/** Plays chunks of samples one after another. The playback starts with the first chunk. */
class Player {
  constructor() {
    this._context = new AudioContext();
    this._endTime = 0; // seconds of the audio context at which the last chunk ends
  }

  add(samples, sampleRate) {
    if (!samples.length) return;
    const buffer = this._context.createBuffer(1, samples.length, sampleRate);
    buffer.copyToChannel(samples, 0);
    const source = this._context.createBufferSource();
    source.buffer = buffer;
    source.connect(this._context.destination);
    this._endTime = Math.max(this._endTime, this._context.currentTime);
    source.start(this._endTime);
    this._endTime += samples.length / sampleRate;
  }

  close() {
    if (this._context.state !== "closed") this._context.close();
  }
}

export class SpeechView {
  /** `onerror(error)` is called with the `ApiError` of a failed request. */
  constructor({ onerror }) {
    this._onerror = onerror;
    this._controller = null;
    this._player = null;
    this._chunks = [];
    this._decoder = new WavDecoder();
    byId("speech-text").value = EXAMPLE_TEXT;
    byId("speech-form").addEventListener("submit", (event) => (event.preventDefault(), this.speak()));
    byId("speech-stop").addEventListener("click", () => this.stop());
    byId("speech-again").addEventListener("click", () => this.replay());
  }

  /** Fills the list of voices. */
  async load() {
    const { voices } = await getJson("v1/audio/voices");
    const options = ["default", ...voices].map((name) => make("option", { value: name, textContent: name }));
    byId("speech-voice").replaceChildren(...options);
  }

  /** Requests the audio of the text and plays it as it arrives. Ends the previous request and its playback first. */
  async speak() {
    const error = byId("speech-error");
    error.textContent = "";
    this.stop();
    const controller = new AbortController();
    this._controller = controller;
    this._chunks = [];
    this._decoder = new WavDecoder();
    this._player = new Player();
    const startedAt = performance.now();
    const elapsed = () => (performance.now() - startedAt) / 1000;
    let firstAudio = 0;
    byId("speech").setAttribute("aria-busy", "true");
    try {
      const body = {
        model: byId("model").value,
        input: byId("speech-text").value,
        voice: byId("speech-voice").value || "default",
        response_format: "wav",
      };
      for await (const bytes of postBytes("v1/audio/speech", body, controller.signal)) {
        const samples = this._decoder.add(bytes);
        if (!samples.length) continue;
        firstAudio ||= elapsed();
        this._chunks.push(samples);
        this._player.add(samples, this._decoder.sampleRate);
        this._show(firstAudio, elapsed());
      }
    } catch (problem) {
      if (controller.signal.aborted) return;
      error.textContent = problem.message;
      if (problem instanceof ApiError) this._onerror(problem);
      else console.error(problem);
    } finally {
      if (this._controller === controller) {
        this._controller = null;
        byId("speech").setAttribute("aria-busy", "false");
      }
    }
  }

  /** Ends the request and the playback. */
  stop() {
    this._controller?.abort();
    this._controller = null;
    this._player?.close();
    byId("speech").setAttribute("aria-busy", "false");
  }

  /** Plays the audio from the beginning. */
  replay() {
    this._player?.close();
    this._player = new Player();
    for (const chunk of this._chunks) this._player.add(chunk, this._decoder.sampleRate);
  }

  _show(firstAudio, elapsed) {
    const seconds = this._chunks.reduce((sum, chunk) => sum + chunk.length, 0) / this._decoder.sampleRate;
    byId("speech-note").textContent =
      `First audio after ${firstAudio.toFixed(2)} s; ${seconds.toFixed(1)} s of audio, real-time factor ${(elapsed / seconds).toFixed(2)}.`;
    byId("speech-again").hidden = false;
    const canvas = byId("speech-wave");
    const context = canvas.getContext("2d");
    const { width, height } = canvas;
    context.clearRect(0, 0, width, height);
    context.fillStyle = getComputedStyle(canvas).color;
    peaks(this._chunks, NUM_BARS).forEach((peak, i) => {
      const size = Math.max(1, Math.min(1, peak) * height);
      context.fillRect((i * width) / NUM_BARS, (height - size) / 2, Math.max(1, width / NUM_BARS - 1), size);
    });
  }
}
