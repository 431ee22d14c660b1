#!/usr/bin/env bash
# What the site serves itself instead of loading it from elsewhere: KaTeX and Mermaid, pinned and checked.
# axe-core, which only the browser tests use, goes to .cache. Needs npm; does nothing when everything is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENDOR=docs/assets/vendor
MERMAID=11.17.2 KATEX=0.19.1 AXE=4.14.1
STAMP="$VENDOR/versions.txt"
WANTED="mermaid-tiny $MERMAID, katex $KATEX, axe-core $AXE"

if [[ -f $STAMP && "$(cat "$STAMP")" == "$WANTED" && -f .cache/axe/axe.min.js ]]; then exit 0; fi
command -v npm >/dev/null || { echo "vendor_assets: npm is missing; install Node.js (Debian: apt-get install npm)" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent "@mermaid-js/tiny@$MERMAID" "katex@$KATEX" "axe-core@$AXE" >/dev/null)
(cd "$work" && sha512sum --quiet --check - <<SUMS
1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b734f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5  axe-core-$AXE.tgz
8c6f2e2a7b63484726d84a503a1d17b6eae93eeb82f6bdd2ab91cb1ddb05756653dbb13aef6485d7d4048bea1fd3f61e3b2d7994381184abebe7ad78b91ac47c  katex-$KATEX.tgz
3e616bd5ce5c49f35fe409e02cb47df03adbbd1e14e4a783ec8fa14241aa1b9c3955ebb7413e1d1b4aaef5ff7d7299ffb0a8f65f14412b4abb10bea1afd358fc  mermaid-js-tiny-$MERMAID.tgz
SUMS
)
for package in mermaid-js-tiny-$MERMAID katex-$KATEX axe-core-$AXE; do
  mkdir "$work/$package" && tar -xzf "$work/$package.tgz" -C "$work/$package" --strip-components=1
done
rm -rf "$VENDOR" && mkdir -p "$VENDOR/katex/contrib" "$VENDOR/katex/fonts" "$VENDOR/mermaid" .cache/axe
cp "$work/mermaid-js-tiny-$MERMAID/dist/mermaid.tiny.js" "$work/mermaid-js-tiny-$MERMAID/LICENSE" "$VENDOR/mermaid/"
cp "$work/katex-$KATEX/dist/"katex.min.{js,css} "$work/katex-$KATEX/LICENSE" "$VENDOR/katex/"
cp "$work/katex-$KATEX/dist/contrib/auto-render.min.js" "$VENDOR/katex/contrib/"
cp "$work/katex-$KATEX/dist/fonts/"*.woff2 "$VENDOR/katex/fonts/"
# only woff2 is served: every browser that runs this site reads it
sed -i -E 's/,url\(fonts\/[A-Za-z0-9_-]+\.(woff|ttf)\) format\("[a-z]+"\)//g' "$VENDOR/katex/katex.min.css"
cp "$work/axe-core-$AXE/axe.min.js" .cache/axe/
echo "$WANTED" >"$STAMP"
echo "vendor_assets: $WANTED"
