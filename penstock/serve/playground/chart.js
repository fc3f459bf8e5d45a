// A line chart with a filled area, for values over time.

/**
 * Draws values into an `svg` with a polygon and a polyline. The x axis has `numPoints` points, the newest value at the
 * right. The y axis ends at `max`.
 */
export function drawLine(svg, values, { numPoints, max }) {
  const [polygon, polyline] = svg.children;
  const firstIndex = numPoints - values.length;
  const points = values.map((value, i) => `${firstIndex + i},${(23.5 - (22.5 * value) / max).toFixed(2)}`);
  polyline.setAttribute("points", points.join(" "));
  polygon.setAttribute("points", points.length ? `${firstIndex},24 ${points.join(" ")} ${numPoints - 1},24` : "");
}
