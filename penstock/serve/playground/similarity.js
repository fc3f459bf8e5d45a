// The page of an embeddings model: the similarity of a few texts as a matrix.

import { ApiError, postJson } from "./api.js";
import { byId, make } from "./dom.js";

const MAX_TEXTS = 20;
const EXAMPLES = ["The cat sat on the mat.", "A kitten rests on a rug.", "The stock market fell today.", "Shares lost value."];

/** Returns the lines of a text that are not blank, each without white space at its ends. */
export const textsOf = (value) => value.split("\n").map((line) => line.trim()).filter(Boolean);

/** Returns the cosine similarity of each pair of vectors, `[n][n]`; 0 for a vector of norm 0. */
export function cosines(vectors) {
  const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  const norms = vectors.map((vector) => Math.sqrt(dot(vector, vector)));
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (norms[i] * norms[j] || 1)));
}

/** Returns a table of the matrix with a row and a column for each text. */
export function matrixTable(texts, matrix) {
  const columnHeader = (i) => make("th", { scope: "col", title: texts[i], textContent: String(i + 1) });
  const head = make("tr", {}, make("td"), ...texts.map((_, i) => columnHeader(i)));
  const rows = matrix.map((row, i) => {
    const name = make("th", { scope: "row", title: texts[i], textContent: `${i + 1}  ${texts[i]}` });
    return make("tr", {}, name, ...row.map((value, j) => cell(value, texts[i], texts[j])));
  });
  return make("table", { class: "matrix" }, make("thead", {}, head), make("tbody", {}, ...rows));
}

function cell(value, rowText, columnText) {
  const element = make("td", { title: `${rowText}\n${columnText}`, textContent: value.toFixed(2) });
  element.style.setProperty("--part", String(Math.max(0, Math.min(1, value))));
  return element;
}

export class SimilarityView {
  /** `onerror(error)` is called with the `ApiError` of a failed request. */
  constructor({ onerror }) {
    this._onerror = onerror;
    this._controller = null;
    byId("similarity-texts").value = EXAMPLES.join("\n");
    byId("similarity-form").addEventListener("submit", (event) => (event.preventDefault(), this.compare()));
  }

  /**
   * Requests the embeddings of the texts and shows their similarities, or shows an error if there are too few or too
   * many texts. A new request cancels the previous request.
   */
  async compare() {
    const texts = textsOf(byId("similarity-texts").value);
    const error = byId("similarity-error");
    error.textContent = "";
    if (texts.length < 2 || texts.length > MAX_TEXTS) {
      error.textContent = `Enter 2 to ${MAX_TEXTS} texts, one per line; there are ${texts.length}.`;
      return;
    }
    this._controller?.abort();
    const controller = new AbortController();
    this._controller = controller;
    byId("similarity").setAttribute("aria-busy", "true");
    try {
      const body = { model: byId("model").value, input: texts, encoding_format: "float" };
      const { data, usage } = await postJson("v1/embeddings", body, controller.signal);
      if (this._controller === controller) this._show(texts, data, usage);
    } catch (problem) {
      if (controller.signal.aborted) return;
      error.textContent = problem.message;
      if (problem instanceof ApiError) this._onerror(problem);
      else console.error(problem);
    } finally {
      if (this._controller === controller) {
        this._controller = null;
        byId("similarity").setAttribute("aria-busy", "false");
      }
    }
  }

  _show(texts, data, usage) {
    const vectors = [...data].sort((a, b) => a.index - b.index).map((item) => item.embedding);
    byId("similarity-matrix").replaceChildren(matrixTable(texts, cosines(vectors)));
    byId("similarity-note").textContent =
      `Cosine similarity, ${vectors[0].length} dimensions, ${usage.prompt_tokens} tokens.`;
  }
}
