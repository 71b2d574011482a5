"""Long texts to look things up in: made of a seed, so that they take no room, and the same everywhere."""
import random

PLACES = ("Almen", "Brekt", "Corvay", "Dunmere", "Estral", "Fennick", "Garrow", "Hollin", "Istrad", "Jorvale",
          "Kestle", "Lumis", "Marrow", "Nettle", "Ostery", "Pellin", "Quarrin", "Rusk", "Selwick", "Torvin")
GOODS = ("barley", "candles", "copper wire", "dyed wool", "flour", "glass", "honey", "iron nails", "lamp oil", "linen",
         "paper", "pepper", "rope", "salt", "slate", "soap", "tar", "timber", "wax", "wine")
SHIPS = ("Albatross", "Bittern", "Cormorant", "Dunlin", "Egret", "Fulmar", "Gannet", "Heron", "Ibis", "Jackdaw",
         "Kittiwake", "Lapwing")
LETTERS = "BCDFGHKLMNPRTVWZ"


def records(count: int, seed: int) -> list[dict[str, str | int]]:
    """What the text says, entry by entry. Entry numbers rise by 1 to 9, so that each is a number of its own."""
    draws = random.Random(seed)     # of which only random() is the same in every Python

    def below(limit: int) -> int:
        return int(draws.random() * limit)

    found: list[dict[str, str | int]] = []
    number = 1000
    for _ in range(count):
        number += 1 + below(9)
        found.append({"entry": number, "ship": SHIPS[below(len(SHIPS))], "goods": GOODS[below(len(GOODS))],
                      "crates": 11 + below(979), "from": PLACES[below(len(PLACES))], "to": PLACES[below(len(PLACES))],
                      "seal": f"{LETTERS[below(len(LETTERS))]}{100 + below(900)}"})
    return found


def archive(count: int, seed: int) -> str:
    """A harbour's ledger of `count` entries, some 30 tokens each."""
    return "\n".join(f"Entry {r['entry']}: the {r['ship']} brought {r['crates']} crates of {r['goods']} "
                     f"from {r['from']} to {r['to']}, under seal {r['seal']}." for r in records(count, seed))
