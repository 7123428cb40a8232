// The server, as the page uses it. All addresses are relative, so that the page also works behind a proxy's prefix.

/** An answer of the server's that is no success. `status` is 0 where there was no answer at all. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(0, "The connection to the server was lost.");
  }
}

/** The data of server-sent events, one after the other: comments and other fields are skipped. */
export async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // given up: the server stops decoding
  }
}

export class Server {
  /** `key()` returns the API key, or "". */
  constructor(key) {
    this.key = key;
  }

  async #fetch(path, options = {}) {
    const key = this.key();
    const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(0, "The server cannot be reached.");
    }
    if (!response.ok) throw new ServerError(response.status, await problem(response));
    return response;
  }

  /** The name of the model, the methods that it can draft by, and the figures of the live view. */
  async stats() {
    return (await this.#fetch("stats")).json();
  }

  /** The chunks of one answer, as they come. */
  async *chat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.code ?? 500, chunk.error.message ?? String(chunk.error));
      yield chunk;
    }
    throw new ServerError(0, "The connection ended before the answer did.");
  }
}

/** The server's own words about what went wrong. */
async function problem(response) {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text);
    return error?.message ?? detail ?? text;
  } catch {
    return text.slice(0, 300) || `Status ${response.status}`;
  }
}
