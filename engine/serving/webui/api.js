// Requests to the server from which the page came.

const BASE = new URL("../", import.meta.url);
const KEY = "bitmirror.key";

// An error whose message is a sentence for the user.
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// The API key. It is kept until the tab is closed, and never with the conversations.
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// The response to a request. Throws ServerError, or AbortError if `signal` says so.
async function respond(path, body, signal) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    const method = body === undefined ? "GET" : "POST";
    response = await fetch(new URL(path, BASE), { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached: see whether it is running.");
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  throw new ServerError(sentence(found) ?? `The server answered with status ${response.status}.`, response.status);
}

// The sentence that an error carries.
function sentence(body) {
  const message = body?.error?.message ?? (typeof body?.error === "string" ? body.error : null);
  return typeof message === "string" && message ? message : null;
}

// The JSON that a request gives; body: undefined for GET.
export async function json(path, body, signal) {
  return (await respond(path, body, signal)).json();
}

// The objects of a stream of server-sent events.
export async function* events(path, body, signal) {
  const response = await respond(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", complete = false;
  try {
    while (!complete) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // a comment that keeps the connection open
        const data = line.slice(5).trim();
        if (data === "[DONE]") {
          complete = true;
          break;
        }
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(sentence(event) ?? "The server ended the answer with an error.");
        yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection to the server was lost: ask again.");
  } finally {
    reader.cancel().catch(() => {});
  }
  if (!complete) throw new ServerError("The connection to the server was lost: ask again.");
}
