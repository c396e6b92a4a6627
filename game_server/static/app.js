"use strict";

// One socket; everything shown comes from the server and goes into the page as text, never as markup.

const MAX_ROWS = 60;
const byId = (id) => document.getElementById(id);
const state = { socket: null, ref: 0, pending: new Map(), room: null, name: "", players: new Map(), asked: new Map(), delays: [], retry: 0 };

function show(id, text) {
  const element = byId(id);
  element.textContent = text;
  element.hidden = !text;
}

function setStatus(kind, text) {
  const element = byId("status");
  element.dataset.state = kind;
  element.textContent = text;
}

function connect() {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const socket = new WebSocket(`${scheme}://${location.host}/ws`);
  state.socket = socket;
  socket.onopen = () => { state.retry = 0; setStatus("open", "connected"); };
  socket.onmessage = (message) => receive(JSON.parse(message.data));
  socket.onclose = () => {
    const wasIn = state.room;
    leave();
    setStatus("closed", "disconnected; trying again");
    if (wasIn) show("problem", `The connection to room ${wasIn} was lost. Join it again.`);
    // With jitter, or all clients of a restarted server come back at the same moment.
    const wait = Math.min(10000, 500 * 2 ** state.retry++) * (0.5 + Math.random() / 2);
    setTimeout(connect, wait);
  };
}

function send(message) {
  if (!state.socket || state.socket.readyState !== WebSocket.OPEN) {
    show("problem", "There is no connection to the server yet.");
    return;
  }
  const ref = ++state.ref;
  state.pending.set(ref, message.op);
  state.asked.set(message.op, performance.now());
  state.socket.send(JSON.stringify({ ...message, ref }));
}

function receive(message) {
  const asked = state.pending.get(message.ref);
  state.pending.delete(message.ref);
  switch (message.op) {
    case "created": enter(message.room); byId("start").hidden = false; show("waiting", message.waiting ? "saved; waiting for Redis" : ""); break;
    case "joined":
      for (const name of message.players) if (!state.players.has(name)) state.players.set(name, 0);
      enter(message.room);
      drawPlayers();
      break;
    case "error": show(asked === "tap" || state.room ? "notice" : "problem", message.message); break;
    case "event": happened(message); break;
  }
}

function enter(code) {
  state.room = code;
  show("problem", "");
  byId("room-code").textContent = code;
  byId("lobby").hidden = true;
  byId("room").hidden = false;
  byId("feed").hidden = false;
  byId("tap").disabled = !state.players.size;
}

function leave() {
  state.room = null;
  state.players.clear();
  state.pending.clear();
  state.asked.clear();
  state.delays = [];
  byId("events").replaceChildren();
  byId("players").replaceChildren();
  byId("latency").textContent = "\u00a0";
  byId("start").hidden = true;
  byId("lobby").hidden = false;
  byId("room").hidden = true;
  byId("feed").hidden = true;
}

function happened(event) {
  const { type, data } = event;
  let text = "";
  let delay = null;
  if (type === "room.created") {
    state.players.set(data.host, 0);
    show("waiting", "");
    text = `${data.host} opened the room`;
    if (data.host === state.name) delay = since("create");
  } else if (type === "room.started") {
    byId("start").hidden = true;
    text = "the game begins";
    delay = since("start");
  } else if (type === "room.joined") {
    state.players.set(data.player, state.players.get(data.player) ?? 0);
    text = `${data.player} came in`;
    if (data.player === state.name) delay = since("join");
  } else if (type === "room.left") {
    state.players.delete(data.player);
    text = `${data.player} left`;
  } else if (type === "tap") {
    state.players.set(data.player, (state.players.get(data.player) ?? 0) + data.count);
    text = `${data.player} tapped`;
    if (data.player === state.name && typeof data.sent === "number") {
      delay = performance.timeOrigin + performance.now() - data.sent;
      remember(delay);
    }
  }
  show("notice", "");
  byId("tap").disabled = false;
  row(type, text, delay);
  drawPlayers();
}

// Milliseconds since we asked for it; null where we did not.
function since(op) {
  const asked = state.asked.get(op);
  state.asked.delete(op);
  return asked === undefined ? null : performance.now() - asked;
}

function remember(delay) {
  state.delays.push(delay);
  if (state.delays.length > 200) state.delays.shift();
  const sorted = [...state.delays].sort((a, b) => a - b);
  const middle = sorted[Math.floor(sorted.length / 2)];
  byId("latency").textContent = `your taps come back in ${middle.toFixed(1)} ms (median)`;
}

function cell(className, text) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  return element;
}

function row(type, text, delay) {
  const item = document.createElement("li");
  item.append(cell("kind", type), cell("text", text), cell("ms", delay === null ? "" : `${delay.toFixed(1)} ms`));
  const list = byId("events");
  list.prepend(item);
  while (list.children.length > MAX_ROWS) list.lastChild.remove();
}

let drawing = false;
function drawPlayers() {
  if (drawing) return;
  drawing = true;
  // At most once a frame, however many events come.
  requestAnimationFrame(() => {
    drawing = false;
    const items = [...state.players].map(([name, taps]) => {
      const item = document.createElement("li");
      item.append(cell(name === state.name ? "me" : "", name), cell("count", `${taps} taps`));
      return item;
    });
    byId("players").replaceChildren(...items);
  });
}

function playerName() {
  const input = byId("name");
  if (!input.reportValidity()) return null;
  state.name = input.value.trim().normalize("NFC");
  return state.name;
}

byId("create").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = playerName();
  if (name) send({ op: "create", name });
});

byId("join").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = playerName();
  if (name) send({ op: "join", room: byId("code").value.trim().toUpperCase(), name });
});

byId("start").addEventListener("click", () => send({ op: "start" }));

byId("tap").addEventListener("click", () => {
  send({ op: "tap", count: 1, sent: performance.timeOrigin + performance.now() });
});

connect();
