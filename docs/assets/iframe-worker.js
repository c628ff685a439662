// A browser starts no Worker from a page that was opened as a file: the search would stay empty.
// This Worker runs its script in a hidden frame of the same page instead. `mkdocs.yml` names it;
// the site's plug-in `offline` would otherwise load one from another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      // A document that is written here is not replaced by an empty one, as a new frame's is.
      this.inside.document.open();
      this.inside.document.write("<!doctype html><body></body>");
      this.inside.document.close();
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      this.isLoaded = new Promise((loaded, failed) => {
        script.onload = loaded;
        script.onerror = failed;
      });
      script.src = url;
      this.inside.document.body.append(script);
    }

    postMessage(data) {
      this.isLoaded.then(() =>
        this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
