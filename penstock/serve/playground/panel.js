// The live statistics. While the page is visible, the panel requests them one second after each response.

import { getJson } from "./api.js";
import { drawLine } from "./chart.js";
import { byId } from "./dom.js";

const PERIOD_MS = 1000; // between a response and the next request
const HISTORY = 60; // points of the graph
const MIN_SCALE = 10; // tokens/s: minimum upper end of the graph's scale

const STATES = {
  ready: "ready",
  starting: "loading the model",
  restarting: "restarting",
  stopping: "shutting down",
  stopped: "stopped",
  unknown: "cannot be reached",
};

export class Panel {
  /** `onstate(state)` is called with the first state and each change; `unknown` if a request fails. */
  constructor({ onstate }) {
    this._onstate = onstate;
    this._state = null;
    this._previousStats = null;
    this._rates = [];
    this._timer = null;
    this._isPolling = false;
    document.addEventListener("visibilitychange", () => this._onVisibility());
    this._onVisibility();
  }

  _onVisibility() {
    clearTimeout(this._timer);
    this._timer = null;
    if (document.visibilityState === "visible") this._poll();
    else this._previousStats = null; // otherwise the next rate would include the time in which the page was hidden
  }

  async _poll() {
    if (this._isPolling) return;
    this._isPolling = true;
    try {
      this._show(await getJson("playground/stats"));
    } catch {
      this._previousStats = null;
      this._setState("unknown");
    } finally {
      this._isPolling = false;
    }
    if (document.visibilityState === "visible") this._timer = setTimeout(() => this._poll(), PERIOD_MS);
  }

  _show(now) {
    this._setState(now.state);
    byId("state").title = `Penstock ${now.version}`;
    const before = this._previousStats;
    this._previousStats = now;
    if (before && now.seconds > before.seconds) {
      const tokens = Math.max(0, now.generated_tokens - before.generated_tokens); // negative after a restart of the worker
      this._rates = [...this._rates, tokens / (now.seconds - before.seconds)].slice(-HISTORY);
    }
    const rate = this._rates.at(-1);
    byId("rate").textContent = rate === undefined ? "–" : String(Math.round(rate));
    byId("running").textContent = String(now.running);
    byId("waiting").textContent = String(now.waiting);
    this._draw();
    this._showCache(now);
  }

  _showCache({ kv_blocks: all, kv_blocks_used: used, kv_blocks_cached: cached }) {
    const fraction = (count) => (all ? count / all : 0);
    byId("kv").textContent = all ? `${(100 * fraction(used)).toFixed(used && fraction(used) < 0.1 ? 1 : 0)} %` : "–";
    const meter = byId("kv-meter");
    meter.style.setProperty("--used", fraction(used).toFixed(4));
    meter.style.setProperty("--cached", fraction(cached).toFixed(4));
    const text = all ? `${used} of ${all} blocks in use, ${cached} cached` : "no cache";
    meter.setAttribute("aria-label", `KV cache: ${text}`);
    byId("kv-note").textContent = text;
  }

  _draw() {
    const max = Math.max(MIN_SCALE, ...this._rates);
    drawLine(byId("spark"), this._rates, { numPoints: HISTORY, max });
    byId("peak").textContent = this._rates.length ? `peak ${Math.round(Math.max(...this._rates))}` : "";
  }

  _setState(state) {
    if (state === this._state) return;
    this._state = state;
    byId("state").dataset.state = state;
    byId("state-text").textContent = STATES[state] ?? state;
    this._onstate(state);
  }
}
