// The parts of a browser that the tested modules of the playground use, and a fake server.

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, value: "", textContent: "" });
    this.style = { setProperty: (name, value) => (this.attributes[`style ${name}`] = value) };
  }
  append(...children) {
    this.children.push(...children);
  }
  replaceChildren(...children) {
    this.children = children;
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  addEventListener(name, listener) {
    this.listeners[name] = listener;
  }
}

const elements = {};
globalThis.document = {
  baseURI: "http://host/prefix/",
  getElementById: (id) => (elements[id] ??= new Element("div")),
  createElement: (tag) => new Element(tag),
};
globalThis.sessionStorage = { getItem: () => "secret" };

export const requests = [];
export const byId = document.getElementById;

/** Answers each request with a function of its body: `[status, value]`. */
export function serve(answer) {
  globalThis.fetch = async (url, options) => {
    const body = JSON.parse(options.body);
    requests.push({ url, body, authorization: options.headers.authorization });
    const [status, value] = answer(body);
    return new Response(JSON.stringify(value), { status });
  };
}

/** Returns the texts of the cells of a table, row by row. */
export const cells = (table) =>
  table.children.flatMap((part) => part.children.map((row) => row.children.map((cell) => cell.textContent)));
