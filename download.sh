#!/bin/sh
# download.sh URL [SHA256]: fetch a DeepSeek V4 Flash GGUF, check it, and link it as ./ds4flash.gguf
#
# An interrupted download goes on where it stopped: run the same command again. Where the file goes: $DS4MLX_MODELS,
# or the directory this is run in. The URL is yours to give: this project hosts no weights.
set -eu

usage() {
    sed -n 's/^# //p' "$0" | head -n 1 >&2
    exit 2
}
fail() {
    echo "download.sh: $*" >&2
    exit 1
}

case ${1:-} in '' | -h | --help) usage ;; esac
[ $# -le 2 ] || usage
url=$1
sha256=${2:-}
case $sha256 in
    *[!0-9a-fA-F]*) fail "the SHA-256 has characters that are not hexadecimal: $sha256" ;;
esac
[ -z "$sha256" ] || [ ${#sha256} -eq 64 ] || fail "the SHA-256 has ${#sha256} digits, need 64"
command -v curl >/dev/null || fail "curl is needed and was not found"

name=${url%%[?#]*}
name=${name##*/}
case $name in *.gguf) ;; *) fail "the URL does not end in a .gguf file: $url" ;; esac
directory=${DS4MLX_MODELS:-.}
mkdir -p "$directory"
file=$directory/$name
partial=$file.partial

if [ -e "$file" ]; then
    echo "$file is there already; checking it"
else
    echo "fetching $name into $directory"
    curl --fail --location --retry 5 --retry-delay 5 --continue-at - --output "$partial" "$url" ||
        fail "the download stopped; run the same command again to go on"
    checked=$partial
fi
checked=${checked:-$file}

[ "$(head -c 4 "$checked")" = GGUF ] || fail "$checked is no GGUF file; remove it and look at what the URL answers"
bytes=$(($(wc -c <"$checked")))
case $name in
    *IQ2XXS*imatrix*) # the published two-bit file
        [ "$bytes" -eq 86720111488 ] || echo "note: $bytes bytes; the published q2-imatrix file has 86720111488" >&2 ;;
esac
if [ -n "$sha256" ]; then
    echo "computing the SHA-256 of $bytes bytes"
    if command -v sha256sum >/dev/null; then found=$(sha256sum "$checked"); else found=$(shasum -a 256 "$checked"); fi
    found=${found%% *}
    [ "$found" = "$(printf %s "$sha256" | tr A-F a-f)" ] || fail "$checked has SHA-256 $found, need $sha256; remove it and fetch it again"
fi

[ "$checked" = "$file" ] || mv "$checked" "$file"
case $file in /*) target=$file ;; *) target=$(CDPATH='' cd -- "$directory" && pwd)/$name ;; esac
if [ -e ds4flash.gguf ] && [ ! -L ds4flash.gguf ]; then
    fail "./ds4flash.gguf is a file of its own; move it away, then: ln -s '$target' ds4flash.gguf"
fi
ln -sf "$target" ds4flash.gguf
echo "ds4flash.gguf -> $target ($bytes bytes)"
