// The page's beginning: which view is shown, the colour scheme, the model.

import { Chat } from "./chat.js";
import { Inspector } from "./inspector.js";
import { keep, kept } from "./keep.js";
import { introduction } from "./legend.js";
import { LiveView } from "./live.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Talks } from "./talks.js";

const byId = (id) => document.getElementById(id);
const THEME = "eyas.theme";

function chooseTheme() {
  const select = byId("theme");
  const apply = () => (select.value ? (document.documentElement.dataset.theme = select.value) : delete document.documentElement.dataset.theme);
  select.value = kept("localStorage", THEME) ?? "";
  apply();
  select.addEventListener("change", () => {
    apply();
    keep("localStorage", THEME, select.value);
  });
}

function chooseView(live) {
  const show = () => {
    const view = location.hash === "#live" ? "live" : "chat";
    for (const name of ["chat", "live"]) {
      byId(`${name}-view`).hidden = name !== view;
      const link = document.querySelector(`nav a[href="#${name}"]`);
      if (name === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (view === "live") live.start();
    else live.stop();
  };
  addEventListener("hashchange", show);
  show();
}

function start() {
  chooseTheme();
  const settings = new Settings(byId("settings"));
  const server = new Server(() => settings.key);
  const inspector = new Inspector(byId("panel"), introduction());
  let model = "";
  const parts = (...ids) => Object.fromEntries(ids.map((id) => [id, byId(id)]));
  const chat = parts("log", "composer", "input", "send", "stop", "status");
  const bar = parts("talks", "new", "more", "markdown", "json", "delete", "empty", "unkept");
  new Chat(chat, bar, server, settings, inspector, new Talks(), () => model);
  chooseView(new LiveView(byId("live-view"), server));
  const learn = async () => {
    try {
      const stats = await server.stats();
      model = stats.model;
      byId("model").textContent = model;
      settings.offerMethods(stats.methods);
    } catch {
      byId("model").textContent = ""; // without a key the server may not say: the first message shows why
    }
  };
  settings.form.elements.key.addEventListener("change", learn);
  learn();
}

start();
