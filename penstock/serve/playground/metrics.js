// The page of live metrics. While the page is visible, it reads /metrics one second after each response.

import { ApiError, getText } from "./api.js";
import { drawLine } from "./chart.js";
import { byId, make } from "./dom.js";
import { Scrape, growth, quantile } from "./prometheus.js";

const PERIOD_MS = 1000; // between a response and the next scrape
const HISTORY = 60; // maximum number of points in a chart, which is about one minute
const ANNOUNCE_EVERY = 15; // scrapes between two announcements
const MIN_RATE = 10; // tokens/s: minimum upper end of the chart

const count = (value) => Math.round(value).toLocaleString("en");
const rate = (value, unit) => `${value < 10 ? value.toFixed(1) : count(value)} ${unit}/s`;
const percent = (fraction) => `${(100 * fraction).toFixed(fraction > 0 && fraction < 0.1 ? 1 : 0)} %`;

/** Returns a duration with its unit. */
export function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.01) return `${(1000 * seconds).toFixed(1)} ms`;
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`;
}

/** A counter: its rate in the last minute, and its value since the start. */
const counter = (label, name, unit) => ({
  label,
  recent: (now, before, seconds) => (seconds ? rate(growth(now, before, name) / seconds, unit) : "–"),
  total: (now) => `${count(now.sum(name))} ${unit}`,
});

/** A histogram of durations: its median and its 95th percentile. */
function durations(label, name) {
  const text = (now, before) => {
    const [median, percentile95] = [0.5, 0.95].map((fraction) => quantile(now, before, name, fraction));
    return median === null ? "–" : `${duration(median)}, 95 % below ${duration(percentile95)}`;
  };
  return { label, recent: (now, before, seconds) => (seconds ? text(now, before) : "–"), total: (now) => text(now, null) };
}

/**
 * Returns the percentage of prompt tokens found in the prefix cache since the scrape `before`, or since the start if
 * `before` is null. Returns "–" if there were no prompt tokens.
 */
function hitRate(now, before) {
  const queries = growth(now, before, "penstock_prefix_cache_queries_total");
  return queries ? percent(growth(now, before, "penstock_prefix_cache_hits_total") / queries) : "–";
}

const ROWS = [
  counter("Output throughput", "penstock_generated_tokens_total", "tokens"),
  counter("Prompt throughput", "penstock_prefilled_tokens_total", "tokens"),
  counter("Answers that ended", "penstock_finished_total", "answers"),
  durations("Time to first token, median", "penstock_time_to_first_token_seconds"),
  durations("Inter-token latency, median", "penstock_inter_token_seconds"),
  durations("Time in the queue, median", "penstock_queue_seconds"),
  {
    label: "Prefix cache hit rate",
    recent: (now, before, seconds) => (seconds ? hitRate(now, before) : "–"),
    total: (now) => hitRate(now, null),
  },
  counter("Preemptions", "penstock_preemptions_total", "requests"),
];

/** Returns the used fraction of the KV cache, 0 to 1; 0 without a KV cache. */
const kvUse = (now) => now.sum("penstock_kv_blocks_used") / (now.sum("penstock_kv_blocks") || 1);

export class MetricsPage {
  /** `onerror(error)` is called after a response with status 401, `onannounce(text)` for screen readers. */
  constructor({ onerror, onannounce }) {
    Object.assign(this, { _onerror: onerror, _onannounce: onannounce });
    this._isShown = false;
    this._timer = null;
    this._round = 0; // number of the polling round; `_poll` drops responses of earlier rounds
    this._scrapes = [];
    this._numScrapes = 0;
    this._cells = ROWS.map(({ label }) => {
      const cells = [make("td", { textContent: "–" }), make("td", { textContent: "–" })];
      byId("metrics-rows").append(make("tr", {}, make("th", { scope: "row", textContent: label }), ...cells));
      return cells;
    });
    document.addEventListener("visibilitychange", () => this._restart());
  }

  /**
   * Starts or stops the polling, which pauses while the document is hidden. A response with status 401 stops the
   * polling until the next call with `true`, or until the document becomes visible again.
   */
  show(isShown) {
    this._isShown = isShown;
    this._restart();
  }

  _restart() {
    clearTimeout(this._timer);
    this._round += 1;
    if (this._isShown && document.visibilityState === "visible") this._poll(this._round);
  }

  async _poll(round) {
    try {
      const text = await getText("metrics");
      if (round !== this._round) return;
      byId("metrics-error").textContent = "";
      this._add(new Scrape(text, performance.now() / 1000));
    } catch (error) {
      if (round !== this._round) return;
      if (!(error instanceof ApiError)) throw error;
      this._scrapes = []; // the counters of a restarted server begin at 0
      if (byId("metrics-error").textContent !== error.message) byId("metrics-error").textContent = error.message;
      if (error.status === 401) return this._onerror(error); // `show` continues after the user has entered an API key
    }
    this._timer = setTimeout(() => this._poll(round), PERIOD_MS);
  }

  _add(now) {
    const previous = this._scrapes.at(-1);
    this._scrapes = [...this._scrapes, now].filter((scrape) => now.seconds - scrape.seconds <= HISTORY * (PERIOD_MS / 1000) + 1);
    const [oldest] = this._scrapes;
    const seconds = now.seconds - oldest.seconds;
    ROWS.forEach(({ recent, total }, i) => {
      this._cells[i][0].textContent = recent(now, oldest, seconds);
      this._cells[i][1].textContent = total(now);
    });
    this._showNow(now, previous);
    this._draw();
    if (this._numScrapes++ % ANNOUNCE_EVERY === 0 && byId("metrics-announce").checked) this._announce();
  }

  /** Shows the current figures. */
  _showNow(now, previous) {
    const tokens = previous ? growth(now, previous, "penstock_generated_tokens_total") / (now.seconds - previous.seconds) : null;
    byId("metrics-tokens").textContent = tokens === null ? "–" : rate(tokens, "tokens");
    byId("metrics-running").textContent = count(now.sum("penstock_requests_running"));
    byId("metrics-waiting").textContent = count(now.sum("penstock_requests_waiting"));
    const numBlocks = now.sum("penstock_kv_blocks");
    byId("metrics-kv").textContent = numBlocks ? `${percent(kvUse(now))} of ${count(numBlocks)} blocks` : "no cache";
  }

  _draw() {
    const pairs = this._scrapes.slice(1).map((now, i) => [now, this._scrapes[i]]);
    const rates = pairs.map(([now, previous]) => growth(now, previous, "penstock_generated_tokens_total") / (now.seconds - previous.seconds));
    const highest = Math.max(0, ...rates);
    drawLine(byId("metrics-rate-line"), rates.slice(-HISTORY), { numPoints: HISTORY, max: Math.max(MIN_RATE, highest) });
    byId("metrics-rate-line").setAttribute("aria-label", `Output throughput in the last minute, at most ${rate(highest, "tokens")}`);
    byId("metrics-rate-note").textContent = `at most ${rate(highest, "tokens")}`;
    const uses = this._scrapes.map(kvUse).slice(-HISTORY);
    drawLine(byId("metrics-kv-line"), uses, { numPoints: HISTORY, max: 1 });
    const highestUse = percent(Math.max(...uses));
    byId("metrics-kv-line").setAttribute("aria-label", `KV cache use in the last minute, at most ${highestUse}`);
    byId("metrics-kv-note").textContent = `at most ${highestUse}`;
  }

  _announce() {
    const text = (id) => byId(id).textContent;
    this._onannounce(
      `${text("metrics-tokens")}, ${text("metrics-running")} running, ${text("metrics-waiting")} waiting, KV cache ${text("metrics-kv")}.`,
    );
  }
}
