// Prometheus' text format: the values of a scrape, and the growth and quantiles of metrics between two scrapes.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const SPECIAL_NUMBERS = { "+Inf": Infinity, "-Inf": -Infinity };

/** The values of one scrape, taken at `seconds`. */
export class Scrape {
  constructor(text, seconds) {
    this.seconds = seconds;
    this._series = new Map(); // name -> [{labels, value}]
    for (const line of text.split("\n")) {
      const match = LINE.exec(line);
      if (!match) continue;
      const [, name, labelsText, number] = match;
      const labels = Object.fromEntries([...(labelsText ?? "").matchAll(LABEL)].map(([, key, value]) => [key, value]));
      if (!this._series.has(name)) this._series.set(name, []);
      this._series.get(name).push({ labels, value: SPECIAL_NUMBERS[number] ?? Number(number) });
    }
  }

  /** Returns the sum of a metric over its labels; 0 if the metric does not exist. */
  sum(name) {
    return (this._series.get(name) ?? []).reduce((total, series) => total + series.value, 0);
  }

  /** Returns [[upper bound, cumulative count], ...] of a histogram, ascending, summed over other labels. */
  buckets(name) {
    const counts = new Map();
    for (const { labels, value } of this._series.get(`${name}_bucket`) ?? []) {
      const bound = SPECIAL_NUMBERS[labels.le] ?? Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return [...counts].sort(([a], [b]) => a - b);
  }
}

/**
 * Returns the growth of a counter, summed over its labels, since the scrape `before`. If `before` is null or the
 * counter has restarted, returns the value of the counter.
 */
export function growth(now, before, name) {
  const [end, begin] = [now.sum(name), before?.sum(name) ?? 0];
  return end < begin ? end : end - begin;
}

/**
 * Returns the quantile `fraction` (0 to 1) of the values that a histogram has counted since the scrape `before`, or since
 * the start if `before` is null. Returns null if there are no values. Interpolates linearly within a bucket. If the
 * quantile is in the last bucket, which has no upper bound, returns the lower bound of this bucket.
 */
export function quantile(now, before, name, fraction) {
  const countsBefore = new Map(before?.buckets(name) ?? []);
  const buckets = now.buckets(name).map(([bound, count]) => [bound, count - (countsBefore.get(bound) ?? 0)]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = fraction * total;
  let [lowerBound, countBelow] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= rank && count > countBelow) {
      return bound === Infinity ? lowerBound : lowerBound + ((bound - lowerBound) * (rank - countBelow)) / (count - countBelow);
    }
    [lowerBound, countBelow] = [bound, count];
  }
  return lowerBound;
}
