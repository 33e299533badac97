// A chat over an OpenAI-compatible gateway: streamed, with the reasoning folded away. No framework.
// Text from the model is only ever set as text, never as HTML.

const $ = (id) => document.getElementById(id);
const history = [];
let gateway = "";
let model = "";
let running = null; // AbortController of the answer that is being written

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function article(role, text) {
  const box = element("article", role);
  const body = element("div", "text", text);
  box.append(body);
  $("messages").append(box);
  return { box, body };
}

// One answer on the page: reasoning above it while there is some, calls and figures below.
class Answer {
  constructor() {
    ({ box: this.box, body: this.body } = article("assistant", ""));
    this.calls = new Map();
    this.started = performance.now();
    this.first = null;
    this.message = { role: "assistant", content: "" };
  }

  reason(text) {
    if (!this.thoughts) {
      this.fold = element("details", "reasoning");
      this.thoughts = element("div", "text", "");
      this.fold.append(element("summary", "", "Reasoning …"), this.thoughts);
      this.box.prepend(this.fold);
    }
    this.thoughts.textContent += text;
    this.message.reasoning_content = this.thoughts.textContent;
  }

  say(text) {
    this.body.textContent += text;
    this.message.content = this.body.textContent;
  }

  call(delta) {
    if (!this.calls.has(delta.index)) {
      this.calls.set(delta.index, { id: "", name: "", arguments: "", box: element("div", "call", "") });
      this.box.append(this.calls.get(delta.index).box);
    }
    const call = this.calls.get(delta.index);
    call.id = delta.id ?? call.id;
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
    call.box.textContent = `${call.name}(${call.arguments})`;
  }

  take(event) {
    const delta = event.choices?.[0]?.delta ?? {};
    if (this.first === null && (delta.reasoning_content || delta.content || delta.tool_calls)) this.first = performance.now();
    if (delta.reasoning_content) this.reason(delta.reasoning_content);
    if (delta.content) this.say(delta.content);
    for (const call of delta.tool_calls ?? []) this.call(call);
    if (event.choices?.[0]?.finish_reason) this.finish = event.choices[0].finish_reason;
    if (event.usage) this.usage = event.usage;
  }

  end(note) {
    if (this.fold) this.fold.querySelector("summary").textContent = "Reasoning";
    if (this.calls.size) {
      this.message.tool_calls = [...this.calls.values()].map(({ id, name, arguments: args }) => ({ id, type: "function", function: { name, arguments: args } }));
    }
    const seconds = (performance.now() - this.started) / 1000;
    const parts = [note ?? this.finish];
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${this.usage.prompt_tokens} tokens in (${cached} cached)`, `${this.usage.completion_tokens} out`);
      parts.push(`${(this.usage.completion_tokens / seconds).toFixed(0)} a second`);
    }
    if (this.first !== null) parts.push(`first after ${(this.first - this.started).toFixed(0)} ms`);
    this.box.append(element("div", "stats", parts.filter(Boolean).join(" · ")));
  }

  fail(text) {
    this.box.append(element("div", "error", text));
  }
}

// The JSON of each server-sent event, whatever the pieces in which the body comes.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value ?? "")).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:") && line.slice(5).trim() !== "[DONE]") yield JSON.parse(line.slice(5));
    }
    if (done) return;
  }
}

function request() {
  const system = $("system").value.trim();
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    temperature: Number($("temperature").value),
    max_completion_tokens: Number($("limit").value),
    reasoning_effort: $("effort").value,
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function ask() {
  const answer = new Answer();
  running = new AbortController();
  try {
    const response = await fetch(`${gateway}/v1/chat/completions`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    if (!response.ok) {
      const body = await response.json().catch(() => ({}));
      throw new Error(body.error?.message ?? `the gateway answered ${response.status}`);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message ?? "the answer broke off");
      answer.take(event);
      follow();
    }
    answer.end();
    history.push(answer.message);
  } catch (error) {
    if (error.name === "AbortError") {
      answer.end("stopped");
      history.push(answer.message);
    } else {
      // The question can be asked again; what went wrong is no part of the conversation.
      answer.fail(error.message);
      const { content } = history.pop();
      $("question").value ||= content;
    }
  }
  running = null;
}

// Scrolls along unless the reader has scrolled up.
function follow() {
  const list = $("messages");
  if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
}

async function send(event) {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("question").value.trim();
  if (!text) return;
  $("question").value = "";
  history.push({ role: "user", content: text });
  article("user", text);
  $("send").textContent = "Stop";
  $("messages").scrollTop = $("messages").scrollHeight;
  await ask();
  $("send").textContent = "Send";
  $("question").focus();
}

async function start() {
  try {
    gateway = (await (await fetch("config.json")).json()).gateway;
    // A port alone: on the host that this page came from.
    if (gateway.startsWith(":")) gateway = `${location.protocol}//${location.hostname}${gateway}`;
    const models = await (await fetch(`${gateway}/v1/models`)).json();
    model = models.data[0].id;
    $("model").textContent = model;
  } catch (error) {
    $("model").textContent = `no gateway: ${error.message}`;
    $("model").classList.add("error");
  }
}

$("form").addEventListener("submit", send);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
$("new").addEventListener("click", () => {
  running?.abort();
  history.length = 0;
  $("messages").replaceChildren();
});
start();
