"""Tools that everybody has (weather, files, search and so on), in many spellings, and how people ask for them."""
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ds4mlx.chat.messages import Json
from ds4mlx.tiny.lessons.schemas import Parameter, Tool, described, described_parameter, joined
from ds4mlx.tiny.lessons.words import Words, held


@dataclass(frozen=True, slots=True)
class Known:
    """`verbs` and `things` make names and descriptions; each of `values` is "names|names: source" of a parameter,
    which is one that can be left out where it begins with a question mark."""
    verbs: str
    things: str
    action: str
    values: tuple[str, ...]
    asks: tuple[str, ...]
    topic: str = ""    # tools of one are asked for alike
    alone: str = ""    # names that are a single word


KNOWN = (
    Known("get fetch check read", "weather forecast current_weather", "get the weather of a place",
          ("city location place town: place",),
          ("What is the weather in {0}?", "How is the weather in {0}?", "What is the weather like in {0}?",
           "Tell me the weather in {0}.", "Weather in {0}?", "Is it raining in {0}?", "How warm is it in {0}?",
           "What's the weather in {0}?", "What's the weather like in {0} today?", "How is the weather in {0} today?",
           "What is the weather in {0} now?"),
          topic="weather"),
    Known("get fetch check", "weather forecast", "get the weather forecast of a city",
          ("city location place: place", "days count: small"),
          ("What will the weather be in {0} for the next {1} days?", "Give me the forecast for {0} for {1} days.",
           "Weather in {0} for {1} days, please."),
          topic="weather"),
    Known("get fetch check", "weather temperature", "get the temperature of a place",
          ("city location place town: place", "?unit units: unit"),
          ("What is the weather in {0}, in {1}?", "What's the weather in {0} in {1}?", "What is the weather in {0}?",
           "What is the temperature in {0}?", "How cold is it in {0}?", "What is the temperature in {0} in {1}?",
           "Temperature in {0} in {1}, please."),
          topic="weather"),
    Known("get read tell", "time clock current_time", "get the time of a place", ("city timezone place: place",),
          ("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?")),
    Known("read open show view cat", "file document", "read a file", ("path file file_path filename: path",),
          ("Read {0}.", "Read the file {0}.", "Open {0}.", "What is in {0}?", "Show me {0}.", "Look at {0}.",
           "Read the file {0} and tell me what is in it."),
          topic="open", alone="read Read cat view open"),
    Known("delete remove", "file document", "delete a file", ("path file file_path filename: path",),
          ("Delete {0}.", "Remove the file {0}.", "Please delete the file {0}.")),
    Known("write create save", "file document", "write a text to a file",
          ("path file file_path filename: path", "content text contents: quoted"),
          ("Write {1} to {0}.", "Save {1} in {0}.", "Put {1} into the file {0}.", "Create {0} with the text {1}."),
          topic="save", alone="write Write create"),
    Known("list show", "files directory folder dir", "list the files of a directory",
          ("path directory folder dir: folder",),
          ("List the files in {0}.", "What files are in {0}?", "Which files are there in {0}?", "List {0}."),
          alone="ls LS list glob"),
    Known("run execute exec", "command shell bash", "run a shell command", ("command cmd: command",),
          ("Run {0}.", "Run the command {0}.", "Execute {0}.", "Please run {0}.",
           "Run the command {0} and tell me what it prints.", "Run the command {0}, then tell me what it printed.",
           "Run the command {0} with your tool, then tell me what it printed.", "Run {0} and tell me the result.",
           "What does {0} print?"),
          alone="bash Bash shell Shell terminal exec run sh"),
    Known("grep search find", "files code text", "search files for a pattern",
          ("pattern regex query: quoted", "?path directory folder: folder"),
          ("Search for {0}.", "Grep for {0}.", "Search for {0} in {1}.", "Find {0} in {1}."),
          topic="search", alone="grep Grep search find"),
    Known("rename move", "file", "move a file", ("source from old_path src: path", "target to new_path dest: path"),
          ("Move {0} to {1}.", "Rename {0} to {1}.")),
    Known("search query", "web internet", "search the web", ("query q search_query: quoted",),
          ("Search the web for {0}.", "Search for {0}.", "Look up {0} on the web.", "Google {0}."),
          topic="search"),
    Known("fetch open get", "url page webpage", "fetch a web page", ("url link address: url",),
          ("Fetch {0}.", "Open {0}.", "What does {0} say?", "Get the page {0}."),
          topic="open"),
    Known("send write", "email mail message", "send an email",
          ("to recipient address: email", "subject title: quoted", "?body text message: quoted"),
          ("Send an email to {0} with the subject {1}.", "Mail {0} with the subject {1} and the text {2}.",
           "Write an email to {0}, subject {1}, text {2}."),
          topic="mail"),
    Known("send post", "message sms text", "send a message to a person",
          ("to recipient person name: person", "text message body: quoted"),
          ("Tell {0} {1}.", "Send {1} to {0}.", "Write {0} the message {1}.", "Send {0} the message {1}."),
          topic="mail"),
    Known("set start create", "timer countdown", "set a timer", ("minutes duration time: small",),
          ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Timer for {0} minutes, please."),
          topic="timer"),
    Known("set create", "alarm", "set an alarm", ("time at hour: time",),
          ("Set an alarm for {0}.", "Wake me at {0}.", "Alarm at {0}, please."),
          topic="timer"),
    Known("create add set", "reminder", "create a reminder", ("text title task: quoted", "?time at: time"),
          ("Remind me of {0}.", "Remind me of {0} at {1}.", "Set a reminder {0} for {1}."),
          topic="calendar"),
    Known("create add schedule", "event meeting appointment", "add an event to the calendar",
          ("title name subject: quoted", "date day: date", "?time start: time"),
          ("Add {0} on {1} to my calendar.", "Schedule {0} on {1} at {2}.", "Put {0} on {1} at {2} in the calendar."),
          topic="calendar"),
    Known("add sum", "numbers", "add two numbers", ("a x first: number", "b y second: number"),
          ("Add {0} and {1}.", "What is {0} plus {1}?", "Use the tool to add {0} and {1}."),
          topic="sum"),
    Known("multiply", "numbers", "multiply two numbers", ("a x first: number", "b y second: number"),
          ("Multiply {0} by {1}.", "What is {0} times {1}?", "Use the tool to multiply {0} and {1}."),
          topic="sum"),
    Known("calculate evaluate compute", "expression formula", "calculate an expression",
          ("expression formula input: sum",),
          ("Calculate {0}.", "What is {0}?", "Compute {0}.", "How much is {0}?"),
          topic="sum"),
    Known("get fetch check", "stock_price price quote", "get the price of a stock", ("symbol ticker stock: symbol",),
          ("What is the price of {0}?", "How is {0} doing?", "Stock price of {0}?", "Get the stock price of {0}.")),
    Known("convert", "currency money", "convert money",
          ("amount value: number", "from from_currency source: currency", "to to_currency target: currency"),
          ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Change {0} {1} into {2}."),
          topic="convert"),
    Known("translate", "text sentence", "translate a text", ("text sentence: quoted", "language target to: language"),
          ("Translate {0} to {1}.", "What is {0} in {1}?", "Say {0} in {1}."),
          topic="convert"),
    Known("play start", "music song track", "play a song", ("song title track: quoted", "?artist by: person"),
          ("Play {0}.", "Play the song {0}.", "Play {0} by {1}.")),
    Known("turn set switch", "light lamp", "switch a light", ("room place area: room", "on state enabled: boolean"),
          ("Turn the light in the {0} to {1}.", "Set the light of the {0} to {1}.")),
    Known("get find lookup", "user customer account", "look up a user", ("user_id id user: code",),
          ("Look up the user {0}.", "Who is the user {0}?", "Find the user {0}.")),
    Known("get track check", "order delivery parcel", "get the status of an order",
          ("order_id id number: code",),
          ("Where is my order {0}?", "What is the status of order {0}?", "Track the order {0}.")),
    Known("book reserve", "flight", "book a flight",
          ("from origin start: place", "to destination target: place", "date day: date"),
          ("Book a flight from {0} to {1} on {2}.", "I need a flight from {0} to {1} on {2}.",
           "Fly me from {0} to {1} on {2}.")),
    Known("book reserve", "table restaurant", "book a table in a restaurant",
          ("restaurant name: proper", "people guests count: small", "?time at: time"),
          ("Book a table at {0} for {1} people.", "Reserve a table at {0} for {1} at {2}.",
           "A table for {1} people at {0} at {2}, please.")),
    Known("get find", "distance route", "get the distance between two places",
          ("from origin start: place", "to destination end: place"),
          ("How far is it from {0} to {1}?", "What is the distance from {0} to {1}?", "Distance from {0} to {1}?")),
)

RENAMED = 0.6     # share of parameters with a name that nobody else gives them
LENGTHENED = 0.4  # share of tools' names with a word that tells nothing, where lessons are varied
PLAIN: dict[str, Callable[[Words], Json]] = {
    "place": Words.place, "path": Words.path, "email": Words.email, "time": Words.time, "date": Words.date,
    "number": Words.number, "code": Words.code, "proper": Words.proper}
LANGUAGES = "French German Spanish Italian Dutch Polish Greek Danish Turkish Japanese Chinese Korean".split()
CURRENCIES = "EUR USD GBP JPY CHF SEK NOK DKK PLN CAD".split()
ROOMS = "kitchen bedroom bathroom garage garden office hall cellar attic".split()
UNITS = ("celsius", "fahrenheit")
COMMANDS = ("ls", "pwd", "ls -la", "git status", "git log", "git diff {p}", "cat {p}", "python {p}", "make test",
            "rm {p}", "wc -l {p}", "head -n {n} {p}", "grep {w} {p}", "echo {w}", "mkdir {w}", "pytest {p}")


def known(words: Words) -> Tool:
    """One of them, its name, parameters and description spelled anew."""
    kind = words.rng.choice(KNOWN)
    parameters = []
    for value in kind.values:
        names, source = value.removeprefix("?").split(": ")
        parameters.append(_parameter(words, words.rng.choice(names.split()), source, not value.startswith("?")))
    rng = words.rng
    return Tool(_name(words, kind), kind.action, tuple(parameters), rng.random() < 0.1, rng.random() < 0.3, kind.asks,
                kind.topic or kind.things, described(rng, kind.action))


def _name(words: Words, kind: Known) -> str:
    """A name of the half that the words are of."""
    rng = words.rng
    if kind.alone and rng.random() < 0.4 and held(name := rng.choice(kind.alone.split())) == words.of_held:
        return name
    longer = words.varied and rng.random() < LENGTHENED
    for _ in range(8):
        parts = [rng.choice(kind.verbs.split()), *rng.choice(kind.things.split()).split("_")]
        name = joined(rng, parts if rng.random() < 0.8 else parts[::-1])
        if held(name) == words.of_held and not longer:
            return name
    while held(name := joined(rng, [*parts, words.word()])) != words.of_held:
        pass
    return name


def _parameter(words: Words, name: str, source: str, required: bool) -> Parameter:
    """Its name is of the half that the words are of: the common ones belong to the lessons."""
    rng = words.rng
    if words.of_held or rng.random() < RENAMED:
        name = joined(rng, [name, words.word()])
    kinds = {"small": "integer", "number": "number", "boolean": "boolean", "unit": "enum"}
    description = described_parameter(rng, name) if rng.random() < 0.4 else ""
    return Parameter(name, kinds.get(source, "string"), required, lambda: _value(words, rng, source),
                     UNITS if source == "unit" else (), description)


def _value(words: Words, rng: Random, source: str) -> Json:
    match source:
        case "small":
            return rng.randint(1, 60)
        case "boolean":
            return rng.random() < 0.5
        case "unit" | "language" | "currency" | "room":
            return rng.choice({"unit": UNITS, "language": LANGUAGES, "currency": CURRENCIES, "room": ROOMS}[source])
        case "person":
            return words.of("people") if rng.random() < 0.5 else words.invented().capitalize()
        case "quoted":
            return rng.choice((words.phrase, words.word, words.text))()
        case "folder":
            return words.path().rsplit("/", 1)[0].rsplit(".", 1)[0] or "src"
        case "command":
            return rng.choice(COMMANDS).format(p=words.path(), w=words.word(), n=rng.randint(1, 50))
        case "url":
            return f"https://{words.word()}.{rng.choice(('com', 'org'))}/{words.word()}"
        case "sum":
            return f"{words.integer()} {rng.choice('+-*/')} {words.integer()}"
        case "symbol":
            return "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(2, 4)))
        case _:
            return PLAIN[source](words)
