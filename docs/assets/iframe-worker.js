// Has the search work when the site is opened from files. Browsers start no Worker for such pages, so its script runs in a
// hidden frame, which answers to the same two calls. Material's offline plugin would load a script from elsewhere for it.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe"), script = document.createElement("script");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => { script.onload = resolve; script.onerror = reject; });
      script.src = address;
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
