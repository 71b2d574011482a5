#!/bin/sh
# download.sh TARGET, or download.sh URL [SHA256]: fetch DeepSeek V4 as GGUF, check it, link it as ./ds4flash.gguf
set -eu

# name, kind, bytes, SHA-256, file. A main model becomes ./ds4flash.gguf; a part is something that goes beside one.
targets() {
    cat <<'END'
q2 main 86720111488 ca22ae2f838e14077c22bc1c1417b71b45b5e5a3687bd96c2ac6e17fdb6261c0 DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-0731.gguf
q2-q4 main 97591747456 659e22fbd01c9e13ea37a57c8d9c41e0a8819dffa3473d3c5286ee44b2d3398f DeepSeek-V4-Flash-Layers37-42Q4KExperts-OtherExpertLayersIQ2XXSGateUp-Q2KDown-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-fixed-0731.gguf
q4 main 164633502592 6bb77b5ddcbc2d974c687cfb63d644ecfb295581b4a53fa4c1d810aea538254a DeepSeek-V4-Flash-Q4KExperts-F16HC-F16Compressor-F16Indexer-Q8Attn-Q8Shared-Q8Out-chat-v2-imatrix-0731.gguf
mxfp4 main 155976458848 0e3a161b670f686128ec5f92a601dfde616a37bf5e7e48999fa2d32471b57ec6 DeepSeek-V4-Flash-MXFP4Experts-F16HC-F16Compressor-F16Indexer-Q8Attn-Q8Shared-Q8Out-chat-v2-mxfp4-0731.gguf
dspark part 5989114272 7e319924541db3f7a163ed7e11d7532a70d48228ab59d36cb81e1d4511885360 DeepSeek-V4-Flash-DSpark-support-0731.gguf
pro main 464627334560 c4d997ab9894b6c78b759f7869fe1726b6314b6515f6ff82607df3797c5eb193 DeepSeek-V4-Pro-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-Instruct-imatrix-0813.gguf
END
}
repository=antirez/deepseek-v4-gguf # what its files hold is pinned by the sums above, so any revision of it will do

usage() {
    cat <<'END'
usage: download.sh TARGET [--no-link]
       download.sh URL [SHA256] [--no-link]

Fetches a model, checks its size and SHA-256, and links it as ./ds4flash.gguf, where ds4mlx looks for it. Stopped, killed
or out of disk space, it goes on from where it was: run the same command again.

END
    targets | while read -r name kind bytes _ _; do
        case $name in
            q2) about='two-bit experts: for 96 to 128 GB of memory' ;;
            q2-q4) about='the same, four bits in the last six layers: for 128 GB and more' ;;
            q4) about='four-bit experts: for 256 GB' ;;
            mxfp4) about='experts as they were published: for 256 GB' ;;
            dspark) about='draft model for speculation, beside a Flash model' ;;
            pro) about='DeepSeek V4 Pro, two-bit experts: for 512 GB' ;;
            *) about='' ;;
        esac
        [ "$kind" = main ] || about="$about; never linked"
        printf '  %-7s %9s  %s\n' "$name" "$(gigabytes "$bytes")" "$about"
    done
    cat <<'END'

  --no-link         leave ./ds4flash.gguf as it is

  DS4MLX_MODELS     folder for the files (the one this is run in)
  HF_ENDPOINT       where targets come from (https://huggingface.co)
  HF_TOKEN          access token, sent to HF_ENDPOINT alone; else read from the file HF_TOKEN_PATH, else from
                    ~/.cache/huggingface/token
END
}

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "download.sh: $*"
    exit 1
}
misuse() {
    say "download.sh: $*"
    usage >&2
    exit 2
}
gigabytes() { printf '%d.%d GB' $(($1 / 1000000000)) $(($1 / 100000000 % 10)); }

bytes_of() { # as GNU and busybox are asked, as BSD is, or by counting: 0 of a file that is not there
    [ -e "$1" ] || { echo 0 && return; }
    stat -L -c %s "$1" 2>/dev/null || stat -L -f %z "$1" 2>/dev/null || echo $(($(wc -c <"$1")))
}

# ---- what is asked for

url='' sha256='' size='' kind=main link=yes
for argument; do
    case $argument in
        -h | --help)
            usage
            exit 0
            ;;
        --no-link) link=no ;;
        -*) misuse "unknown option: $argument" ;;
        '') misuse "an argument is empty" ;;
        *)
            if [ -z "$url" ]; then
                url=$argument
            elif [ -z "$sha256" ]; then
                sha256=$argument
            else
                misuse "one argument too many: $argument"
            fi
            ;;
    esac
done
[ -n "$url" ] || misuse "nothing is asked for; need a TARGET or a URL"

endpoint=${HF_ENDPOINT:-https://huggingface.co}
endpoint=${endpoint%/}
case $url in
    *://*)
        name=${url%%[?#]*}
        name=${name##*/}
        ;;
    *)
        [ -z "$sha256" ] || misuse "the sum of a target is known; leave out $sha256"
        wanted=${url#ds4f-} # the names that ds4's script has had
        wanted=${wanted%-imatrix}
        [ "$wanted" != pro-q2 ] || wanted=pro
        found=$(targets | while read -r row; do case $row in "$wanted "*) echo "$row" ;; esac done)
        [ -n "$found" ] || misuse "no target $url"
        read -r _ kind size sha256 name <<END
$found
END
        url=$endpoint/$repository/resolve/main/$name
        ;;
esac
case $name in *.gguf) ;; *) fail "the URL does not end in a .gguf file: $url" ;; esac
case $sha256 in *[!0-9a-fA-F]*) fail "the SHA-256 has characters that are not hexadecimal: $sha256" ;; esac
[ -z "$sha256" ] || [ ${#sha256} -eq 64 ] || fail "the SHA-256 has ${#sha256} digits, need 64"
sha256=$(printf %s "$sha256" | tr A-F a-f)
command -v curl >/dev/null || fail "curl is needed and was not found"

# ---- the token: from the environment or a file to curl's standard input, never into the arguments of a process

token=${HF_TOKEN:-}
token_file=${HF_TOKEN_PATH:-${HF_HOME:-${HOME:-}/.cache/huggingface}/token}
if [ -z "$token" ] && [ -r "$token_file" ]; then token=$(tr -d ' \t\r\n' <"$token_file"); fi
case $token in
    *[!A-Za-z0-9._-]*) fail "the access token has characters that no token has; look at HF_TOKEN or $token_file" ;;
esac
case $url in
    "$endpoint"/*) ;;
    *) token='' ;; # a stranger's
esac
case $url in
    https://* | http://127.0.0.1[:/]* | http://localhost[:/]*) ;;
    *) [ -z "$token" ] || fail "the token would go over $url unencrypted; use https, or unset HF_TOKEN" ;;
esac

credentials() { [ -z "$token" ] || printf 'header = "Authorization: Bearer %s"\n' "$token"; } # for curl --config -

# ---- fetching

announced() { # the size that the server tells, or nothing: of a file that it redirects to, as it names it
    credentials | curl --config - --location --silent --head --max-time 60 "$url" 2>/dev/null | tr -d '\r' | awk '
        /^HTTP\// { ok = $2 == 200; length_told = "" }
        tolower($1) == "x-linked-size:" { linked = $2 }
        tolower($1) == "content-length:" && ok { length_told = $2 }
        END { print linked != "" ? linked : length_told }'
}

free_bytes() { # df -P ends a line with: available, used in percent, mount point
    df -Pk "$directory" | awk 'NR == 2 {
        for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+%$/) { printf "%.0f\n", $(i - 1) * 1024; exit }
    }'
}

check_room() {
    room=$(free_bytes)
    left=$((size - $(bytes_of "$partial")))
    [ -z "$room" ] || [ "$room" -ge "$left" ] ||
        fail "$directory has $(gigabytes "$room") free, need $(gigabytes "$left"); make room, or set DS4MLX_MODELS to" \
            "a folder on another disk"
}

held() { # whether a process of the lock lives: the owner
    [ -r "$lock" ] || return 1
    while read -r owner; do
        kill -0 "$owner" 2>/dev/null || continue
        case $(ps -o stat= -p "$owner" 2>/dev/null) in Z*) ;; *) return 0 ;; esac # nobody buries the dead in a container
    done <"$lock"
    return 1
}

take_lock() { # two that write one file spoil it: this script's and curl's, which outlives a script that is killed
    if ! (set -C && echo $$ >"$lock") 2>/dev/null; then
        ! held || fail "process $owner is fetching $name already; if it does something else, remove $lock"
        echo $$ >"$lock" || fail "$directory cannot be written; set DS4MLX_MODELS to a folder of yours"
    fi
    trap 'rm -f "$lock" "$status"' EXIT
    trap 'stopped 129' HUP
    trap 'stopped 130' INT
    trap 'stopped 143' TERM
}

stopped() {
    [ -z "$curl" ] || kill "$curl" 2>/dev/null || true
    say "stopped with $(bytes_of "$partial") bytes; run the same command again to go on"
    exit "$1"
}

transfer() { # one connection, from the end of what is there. In the background, so that a signal is heard at once.
    if [ -t 2 ]; then shown=--progress-bar; else shown=--silent; fi
    credentials | curl --config - --location --fail --show-error "$shown" --connect-timeout 60 --speed-limit 1 \
        --speed-time 60 --continue-at - --write-out '%{http_code}' --output "$partial" "$url" >"$status" &
    curl=$!
    printf '%s\n' $$ "$curl" >"$lock"
    code=0
    wait "$curl" || code=$?
    curl=''
}

whole() { [ -n "$size" ] && [ "$(bytes_of "$partial")" -ge "$size" ]; }

fetch() { # until everything is here; gives up after five connections in a row that brought nothing
    idle=0
    until whole; do
        before=$(bytes_of "$partial")
        [ "$idle" = 0 ] || sleep $((idle * idle))
        transfer
        http=$(cat "$status" 2>/dev/null || true)
        case $code:$http in
            0:*) [ -n "$size" ] || return 0 ;;
            23:*)
                fail "$partial cannot be written any further: is the disk full? What is there stays; make room and run" \
                    "the same command again"
                ;;
            22:401 | 22:403)
                fail "the server refuses with $http: $url needs a token; set HF_TOKEN to one that may read it"
                ;;
            22:404 | 22:410) fail "the server has no $url ($http)" ;;
            33:* | 22:416)
                say "the server cannot go on at byte $before; starting over"
                rm -f "$partial"
                ;;
            22:5?? | 22:408 | 22:429) say "the server answers $http; trying again" ;;
            22:*) fail "the server answers $http to $url" ;;
            *) say "the connection broke at byte $(bytes_of "$partial") (curl: $code); going on" ;;
        esac
        if [ "$(bytes_of "$partial")" -gt "$before" ]; then idle=1; else idle=$((idle + 1)); fi
        [ "$idle" -le 5 ] || fail "the download stopped at byte $before; run the same command again to go on"
    done
}

# ---- checking

sum_of() {
    if command -v sha256sum >/dev/null; then sha256sum <"$1"; else shasum -a 256 <"$1"; fi | cut -d ' ' -f 1
}

check() { # the file $1; what is wrong with it goes to the name $1.wrong, so that the next run begins anew
    bytes=$(bytes_of "$1")
    fault=''
    if [ "$(head -c 4 "$1")" != GGUF ]; then
        fault="is no GGUF file"
    elif [ -n "$size" ] && [ "$bytes" -ne "$size" ]; then
        fault="has $bytes bytes, need $size"
    elif [ -n "$sha256" ]; then
        say "computing the SHA-256 of $(gigabytes "$bytes")"
        sum=$(sum_of "$1")
        [ "$sum" = "$sha256" ] || fault="has SHA-256 $sum, need $sha256"
    fi
    [ -z "$fault" ] || {
        mv -f "$1" "$file.wrong"
        fail "$name $fault. It is $file.wrong: look at what the server sent, remove it, and run the same command again"
    }
}

directory=${DS4MLX_MODELS:-.}
mkdir -p "$directory" || fail "$directory cannot be made; set DS4MLX_MODELS to a folder of yours"
file=$directory/$name partial=$directory/$name.partial
lock=$partial.lock status=$partial.http curl=''

if [ -e "$file" ]; then
    say "$file is there already; checking it"
    check "$file"
else
    take_lock
    told=$(announced || true)
    case $told in *[!0-9]*) told='' ;; esac
    [ -z "$size" ] || [ -z "$told" ] || [ "$told" -eq "$size" ] ||
        fail "the server's $name has $told bytes, need $size; it is not the published file"
    size=${size:-$told}
    [ -z "$size" ] || check_room
    say "fetching $name${size:+, $(gigabytes "$size"),} into $directory"
    fetch
    check "$partial"
    mv "$partial" "$file"
fi

case $kind:$link in
    main:yes) ;;
    *)
        say "$file is whole ($bytes bytes)"
        exit 0
        ;;
esac
case $file in /*) target=$file ;; *) target=$(CDPATH='' cd -- "$directory" && pwd)/$name ;; esac
if [ -e ds4flash.gguf ] && [ ! -L ds4flash.gguf ]; then
    fail "./ds4flash.gguf is a file of its own; move it away, then: ln -s '$target' ds4flash.gguf"
fi
ln -sf "$target" ds4flash.gguf
say "ds4flash.gguf -> $target ($bytes bytes)"
