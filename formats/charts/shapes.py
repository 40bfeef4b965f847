"""SVG elements that charts are drawn with."""

from xml.etree.ElementTree import Element, SubElement

from lowbit.formats.printable import printable

Size = tuple[float, float]  # width and height


def svg_file(title: str, size: Size, style: str) -> Element:
    """The root of an SVG file: namespace, size, title and style sheet; no outside resource."""
    width, height = (f"{value:g}" for value in size)
    named = {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "width": width, "height": height}
    root = Element("svg", {**named, "viewBox": f"0 0 {width} {height}"})
    SubElement(root, "title").text = printable(title)
    SubElement(root, "style").text = style
    return root


def line(parent: Element, u: float, v: float, to_u: float, to_v: float, style: str) -> Element:
    """A straight line between two points; `style` is a class of the style sheet."""
    return SubElement(parent, "line", {"class": style, **_numbers(x1=u, y1=v, x2=to_u, y2=to_v)})


def box(parent: Element, u: float, v: float, size: Size, style: str) -> Element:
    """A rectangle by its upper left corner and its size."""
    place = _numbers(x=u, y=v, width=size[0], height=size[1])
    return SubElement(parent, "rect", {"class": style, **place})


def circle(parent: Element, u: float, v: float, style: str, radius: float) -> Element:
    """A circle by its centre."""
    place = {**_numbers(cx=u, cy=v), "r": f"{radius:g}"}
    return SubElement(parent, "circle", {"class": style, **place})


def text(parent: Element, u: float, v: float, words: str, anchor: str, style: str) -> Element:
    """One line of text whose baseline is at v; `anchor` is start, middle or end."""
    place = {**_numbers(x=u, y=v), "text-anchor": anchor}
    element = SubElement(parent, "text", {**place, "class": style})
    element.text = printable(words)
    return element


def _numbers(**values: float) -> dict[str, str]:
    return {name: f"{value:.2f}" for name, value in values.items()}
