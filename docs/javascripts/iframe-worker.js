/* Search without a server: browsers forbid workers on file://, so the worker's scripts run in a hidden frame. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const page = frame.contentDocument;
      page.open();
      page.write("<!doctype html><title>worker</title>");
      page.close();
      const load = (source) =>
        new Promise((done, failed) => {
          const script = page.createElement("script");
          Object.assign(script, { src: source, onload: done, onerror: failed });
          page.head.append(script);
        });
      this.inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        if (this.onmessage) this.onmessage(event);
        this.dispatchEvent(event);
      };
      this.inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(new URL(source, url))), Promise.resolve());
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
