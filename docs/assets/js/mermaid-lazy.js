// Material asks for window.mermaid on every page. This stand-in loads the real one, 2.5 MB, only where a diagram is.
(function () {
  const here = document.currentScript.src;
  let config = {}, loading = null;
  function load() {
    loading = loading || new Promise(function (resolve, reject) {
      const stub = window.mermaid, script = document.createElement("script");
      script.src = new URL("../vendor/mermaid/mermaid.tiny.js", here).href;
      script.onload = function () {
        const real = window.mermaid;
        window.mermaid = stub;
        real.initialize(config);
        resolve(real);
      };
      script.onerror = reject;
      document.head.appendChild(script);
    });
    return loading;
  }
  window.mermaid = {
    initialize: function (wanted) { config = wanted; },
    render: async function () { const real = await load(); return real.render.apply(real, arguments); },
  };
})();
