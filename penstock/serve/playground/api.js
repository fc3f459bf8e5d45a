// HTTP requests: API key, OpenAI errors, server-sent events.

const STORAGE_NAME = "penstock.api-key";

/** An error response of the server, an invalid response, or a network error. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null, requestId = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter, requestId });
  }
}

/** The API key of this tab, in sessionStorage. The browser deletes sessionStorage when the tab is closed. */
export const apiKey = {
  get: () => sessionStorage.getItem(STORAGE_NAME),
  set: (value) => sessionStorage.setItem(STORAGE_NAME, value),
  remove: () => sessionStorage.removeItem(STORAGE_NAME),
};

/** Returns the URL of a route for a path without a leading slash. A proxy may serve page and routes under a prefix. */
export const urlOf = (path) => new URL(path, document.baseURI).href;

/** Sends a GET request and returns the decoded response. */
export async function getJson(path) {
  const response = await send(path, {});
  return await decodeJson(response);
}

/** Sends a GET request and returns the response as text. */
export async function getText(path) {
  return await (await send(path, {})).text();
}

/** Sends a POST request and returns the decoded response. */
export async function postJson(path, body, signal) {
  return await decodeJson(await send(path, jsonPost(body, signal)));
}

/**
 * Sends a POST request and yields the JSON value of each event before `[DONE]`.
 * Throws an `ApiError` if the request fails, if an event contains an error, or if `[DONE]` is missing.
 */
export async function* postStream(path, body, signal) {
  const response = await send(path, jsonPost(body, signal));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw errorOf(value, response);
    yield value;
  }
  throw new ApiError("The stream ended before it was complete.");
}

/** Sends a POST request and yields the bytes of the response as they arrive. */
export async function* postBytes(path, body, signal) {
  const reader = (await send(path, jsonPost(body, signal))).body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

const jsonPost = (body, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

async function send(path, options) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(urlOf(path), { ...options, headers, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw errorOf(await decodeJson(response), response);
  return response;
}

async function decodeJson(response) {
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`The response (status ${response.status}) is not JSON.`, { status: response.status });
  }
}

function errorOf(value, response) {
  const { message, code, param } = value.error ?? {};
  return new ApiError(String(message ?? `status ${response.status}`), {
    status: response.status,
    code,
    param,
    retryAfter: response.headers.get("retry-after"),
    requestId: response.headers.get("x-request-id"),
  });
}

/** Yields the data of each server-sent event of a byte stream. Chunks can end anywhere in an event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let incompleteEvent = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const completeEvents = (incompleteEvent + value).split("\n\n");
      incompleteEvent = completeEvents.pop();
      for (const event of completeEvents) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError) throw new ApiError("The connection was lost.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
