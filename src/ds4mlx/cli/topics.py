"""What `ds4mlx help TOPIC` says of things that belong to no single command."""

TOPICS = {
    "models": """\
Which model a command works on
  --model FILE.gguf, or the variable DS4MLX_MODEL, or else ./ds4flash.gguf if there is one, or else the built-in tiny
  model, which calls tools and knows little. --model tiny asks for that one, --model noise for one of random weights.

  ./download.sh --help      the published files, their sizes, and how much memory each is for
  ds4mlx inspect FILE.gguf  what a file is and how much memory a context needs, without loading it

  One big model at a time: a second process that would load one is refused, unless it is given --no-lock.
""",
    "settings": """\
Where settings come from
  A flag wins over the environment, which wins over a file, which wins over the default. --ctx 65536, DS4MLX_CTX=65536
  and ctx = 65536 are one setting. --config FILE.toml, or DS4MLX_CONFIG, names the file: keys at its top are for every
  command, those of a section such as [serve] for one. Keys and sections that do not exist are errors.

    ctx = 65536
    [serve]
    port = 8080

  Further variables: DS4MLX_HOME (help files), NO_COLOR (no colours), DS4MLX_NO_LOCK.
""",
    "sampling": """\
How tokens are chosen
  --temp 0 always takes the likeliest token; 1 draws as the model means. The default is what the model file recommends
  (0 for the built-in one), else 1. --min-p 0.05, the default, leaves out what is less than a twentieth
  as likely as the best; --top-p and --top-k cut the rest, 1 and 0 being off.
  --seed makes an answer repeatable: the same seed, settings and prompt give the same answer, whatever else runs.
  -n limits the tokens of an answer, reasoning among them; --stop ends it before a text.
""",
    "thinking": """\
Reasoning before an answer
  --think, the default, or --nothink; --think-level low|high|max says how hard, --think-max being the last. Effort max
  needs a large context and is lowered in a smaller one, with a warning. Checkpoints differ in what they take an effort
  for: --effort-profile. On a terminal reasoning is shown dim; in a pipe it is left out, unless asked for.
""",
    "states": """\
Nothing is computed twice
  The state of a conversation stays in memory: the next message computes what is new, and going back in it (another
  answer, an edited message) computes from there on. --kv-rewind-points is how many places there are to go back to.
  With --kv-disk-dir DIR states are kept on disk as well, over a restart. Files hold what was said and are readable by
  their owner alone; ds4mlx cache lists, checks and deletes them. ds4mlx trace says why something was computed again.
""",
    "page": """\
The server in a browser
  What ds4mlx serve prints as its address is a page: a conversation, with tools whose results are typed in, and beside
  it what each slot holds, who runs and waits, what every request went on from and why from no more. It asks no other
  server, and asks for the key where there is one. What it shows, programs read as JSON: GET /stats, GET
  /admin/requests (those that run, wait, and ended last), POST /admin/requests/ID/cancel.
""",
    "files": """\
Where things are kept
  ~/.ds4mlx, or DS4MLX_HOME      history (what was typed in chat), chats/ (conversations kept with --keep), engine.lock
  ~/.cache/ds4mlx                the built-in model, made anew when it is missing (macOS: ~/Library/Caches/ds4mlx)
  --kv-disk-dir DIR              states of conversations, nowhere unless given
  All of them can be read by their owner alone. Nothing is sent anywhere.
""",
    "exit-codes": """\
What a command exits with
  0    done
  1    failed: a model that is missing or damaged, no memory, a prompt that is too long, a full disk
  2    misused: an option that does not exist, or a value that cannot be; the first line names it
  3    a check that was asked for did not hold
  130  interrupted. The first Ctrl+C ends what goes on and keeps what there is; a second one within two seconds leaves

  What a program reads is on standard output, all else on standard error. --debug shows where an error came from.
""",
}
