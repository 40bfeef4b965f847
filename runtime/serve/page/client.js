// Requests to the server, and what its errors mean.

class ServerError extends Error {
  constructor(status, message, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function readHealth() {
  try {
    return await (await fetch("health")).json();
  } catch {
    return {};
  }
}

// The first model that the server names; null if it wants a key, or cannot be reached.
export async function readModel(key) {
  try {
    const response = await fetch("v1/models", { headers: headersOf(key) });
    return response.ok ? ((await response.json()).data[0] ?? null) : null;
  } catch {
    return null;
  }
}

export async function readReport(key) {
  return (await fetch("report", { headers: headersOf(key) })).blob();
}

// Parts of an answer as they come: `reasoning` and `content`, `reason` for its end, `usage`.
export async function* ask(body, key, signal) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headersOf(key) },
    body: JSON.stringify({ ...body, ...options }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(0, chunk.error.message, chunk.error.code);
    const [choice] = chunk.choices ?? [];
    const delta = choice?.delta ?? {};
    yield {
      reasoning: delta.reasoning ?? delta.reasoning_content,
      content: delta.content,
      reason: choice?.finish_reason,
      usage: chunk.usage,
    };
  }
  throw new ServerError(0, "The stream ended before the answer did.");
}

// The data of server-sent events.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

async function errorOf(response) {
  let found = {};
  try {
    found = (await response.json()).error ?? {};
  } catch {
    // a body that is no error of the API, such as one of a proxy
  }
  const message = found.message ?? `The server answered with status ${response.status}.`;
  const wait = response.headers.get("Retry-After");
  return new ServerError(response.status, wait ? `${message} (in ${wait} s)` : message, found.code);
}

// An error as a title and a text, and whether a key may help.
export function explained(error) {
  if (!(error instanceof ServerError)) {
    return {
      title: "The server cannot be reached",
      text: "Check that lowbit-run serve is running, then retry.",
    };
  }
  const titles = {
    401: "The server wants an API key",
    413: "The message is too large",
    429: "The server is busy",
    503: "The server is shutting down",
  };
  const long = error.code === "context_length_exceeded";
  const title = long
    ? "The conversation is too long for the model"
    : (titles[error.status] ?? "The answer failed");
  return { title, text: sentence(error.message), key: error.status === 401 };
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?)]$/.test(begun) ? begun : `${begun}.`;
}
