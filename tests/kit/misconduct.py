"""What a rule of conduct raises."""


class Misconduct(AssertionError):
    """An order was obeyed in a way that it should not be. The message starts with the rule's name."""


def must(holds: object, rule: str, *what: object) -> None:
    if not holds:
        raise Misconduct(f"{rule}: " + " ".join(str(each) for each in what))
