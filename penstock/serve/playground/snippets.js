// A request as a shell command or a Python program. Both read the API key from PENSTOCK_API_KEY and never contain it.

const OPENAI_FIELDS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "frequency_penalty",
  "presence_penalty",
  "seed",
  "max_completion_tokens",
  "stop",
  "logprobs",
  "top_logprobs",
  "tools",
]);

/** Returns a shell command that sends the request and prints the stream. */
export function curl(body, base) {
  const json = JSON.stringify({ ...body, stream: true }, null, 2);
  return [
    `curl -N ${quoted(`${base}v1/chat/completions`)} \\`,
    `  -H 'Content-Type: application/json' \\`,
    `  -H "Authorization: Bearer \${PENSTOCK_API_KEY:-none}" \\`,
    `  -d ${quoted(json)}`,
  ].join("\n");
}

/** Returns a Python program that sends the request with the openai package and prints the streamed text. */
export function python(body, base) {
  const openaiFields = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const extraFields = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
  const fields = openaiFields.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (extraFields.length) fields.push(`    extra_body=${literal(Object.fromEntries(extraFields), 1)},`);
  return `import os

from openai import OpenAI

client = OpenAI(
    base_url=${literal(`${base}v1`)},
    api_key=os.environ.get("PENSTOCK_API_KEY", "none"),
)
stream = client.chat.completions.create(
${fields.join("\n")}
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()`;
}

/** Quotes a text for the shell. */
function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** Returns a value as a Python literal. */
function literal(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const items = Array.isArray(value)
    ? value.map((element) => literal(element, depth + 1))
    : Object.entries(value).map(([name, member]) => `${JSON.stringify(name)}: ${literal(member, depth + 1)}`);
  const oneLine = `${open}${items.join(", ")}${close}`;
  if (oneLine.length <= 80 && !oneLine.includes("\n")) return oneLine;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${items.map((item) => `${indent}${item},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
