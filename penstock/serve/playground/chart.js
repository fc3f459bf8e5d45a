// A line chart with a filled area, for values over time.

/** Draws values, newest at the right, into an `svg` with a polygon and a polyline. The y axis ends at `max`. */
export function drawLine(svg, values, { count, max }) {
  const [polygon, polyline] = svg.children;
  const firstIndex = count - values.length;
  const points = values.map((value, i) => `${firstIndex + i},${(23.5 - (22.5 * value) / max).toFixed(2)}`);
  polyline.setAttribute("points", points.join(" "));
  polygon.setAttribute("points", points.length ? `${firstIndex},24 ${points.join(" ")} ${count - 1},24` : "");
}
