// What the browser keeps for this page. `where` is "localStorage" or "sessionStorage"; where it keeps nothing, even their names may throw.

/** The text that is kept under a name; null without one. */
export function kept(where, name) {
  try {
    return window[where].getItem(name);
  } catch {
    return null;
  }
}

/** Keep a text (null: nothing any more); return whether that worked. */
export function keep(where, name, text) {
  try {
    if (text === null) window[where].removeItem(name);
    else window[where].setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

/** The same for JSON; what is damaged counts as nothing. */
export function keptObject(where, name) {
  try {
    return JSON.parse(kept(where, name));
  } catch {
    return null;
  }
}

/** All names that begin with `prefix`. */
export function keptNames(where, prefix) {
  try {
    return Object.keys(window[where]).filter((name) => name.startsWith(prefix));
  } catch {
    return [];
  }
}
