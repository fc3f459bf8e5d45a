"""Pictures of coloured shapes, drawn with Pillow."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS = {
    "red": (220, 30, 35),
    "orange": (245, 140, 25),
    "yellow": (245, 215, 40),
    "green": (35, 150, 60),
    "blue": (35, 80, 210),
    "purple": (130, 45, 160),
    "black": (20, 20, 25),
}
BACKGROUNDS = {"white": (250, 250, 250), "grey": (170, 170, 170), "pink": (250, 205, 215)}
MAX_SHAPES = 6
_MAX_COLOUR_CHANGE = 14
"""The largest random change of a channel of a shape's colour."""


@dataclass(frozen=True, slots=True)
class Thing:
    """A coloured shape in a picture.

    x, y and radius are fractions of the picture's side. The angle is in radians.
    """

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of a picture: a background colour and coloured shapes."""

    background: str
    things: tuple[Thing, ...]

    def count(self, shape: str | None = None, colour: str | None = None) -> int:
        """Return the number of things of a shape and colour. None matches all."""
        return sum(shape in (None, thing.shape) and colour in (None, thing.colour) for thing in self.things)


def random_scene(rng: random.Random) -> Scene:
    """Return a scene of 0 to `MAX_SHAPES` shapes that do not overlap."""
    count = rng.choices(range(MAX_SHAPES + 1), weights=[1, 6, 8, 8, 7, 6, 5])[0]
    # Few kinds of shapes, so that a picture can have several things of one kind.
    shapes = rng.sample(SHAPES, rng.choice((1, 2, 2, 3, 4, 5)))
    colours = rng.sample(list(COLOURS), rng.choice((1, 2, 2, 3, 4, 7)))
    max_radius = {0: 0.2, 1: 0.3, 2: 0.24, 3: 0.2, 4: 0.18, 5: 0.16, 6: 0.15}[count]
    things: list[Thing] = []
    for _ in range(200):
        if len(things) == count:
            break
        radius = rng.uniform(0.1, max_radius)
        x, y = (rng.uniform(radius + 0.01, 0.99 - radius) for _ in range(2))
        if any(math.hypot(x - thing.x, y - thing.y) < radius + thing.radius + 0.02 for thing in things):
            continue
        angle = rng.uniform(-0.15, 0.15)
        things.append(Thing(rng.choice(shapes), rng.choice(colours), x, y, radius, angle))
    return Scene(rng.choice(list(BACKGROUNDS)), tuple(things))


def draw(scene: Scene, size: tuple[int, int], rng: random.Random | None = None) -> Image.Image:
    """Return a picture of a scene. With ``rng``, colours vary randomly.

    If the picture is not square, the shapes are stretched.
    """
    image = Image.new("RGB", size, _vary_colour(BACKGROUNDS[scene.background], rng, 5))
    canvas = ImageDraw.Draw(image)
    for thing in scene.things:
        colour = _vary_colour(COLOURS[thing.colour], rng)
        points = [(x * size[0], y * size[1]) for x, y in _outline(thing)]
        canvas.polygon(points, fill=colour)
    return image


def class_maps(scene: Scene, grid: int) -> np.ndarray:
    """Return the classes ``[grid, grid, 4]`` of the cells of a grid.

    The vision tower learns these classes as a second task. The first two numbers of a cell are the shape and
    colour of the thing whose centre is within 0.7 times its radius of the centre of the cell. The last two
    numbers are the shape and colour of the thing whose centre is in the cell. 0 means no thing.
    """
    maps = np.zeros((grid, grid, 4), np.int64)
    middles = (np.arange(grid) + 0.5) / grid
    for thing in scene.things:
        kind = SHAPES.index(thing.shape) + 1, list(COLOURS).index(thing.colour) + 1
        distance = np.hypot(middles[None, :] - thing.x, middles[:, None] - thing.y)
        maps[distance < 0.7 * thing.radius, :2] = kind
        maps[int(thing.y * grid), int(thing.x * grid), 2:] = kind
    return maps


def _vary_colour(
    colour: tuple[int, int, int], rng: random.Random | None, max_change: int = _MAX_COLOUR_CHANGE
) -> tuple[int, ...]:
    """Return the colour with random changes of its channels, or unchanged without ``rng``."""
    if rng is None:
        return colour
    return tuple(min(255, max(0, channel + rng.randint(-max_change, max_change))) for channel in colour)


def _outline(thing: Thing) -> list[tuple[float, float]]:
    """Return the corners of a shape in the picture, as x and y."""
    return [
        (
            thing.x + thing.radius * radius * math.sin(thing.angle + angle),
            thing.y - thing.radius * radius * math.cos(thing.angle + angle),
        )
        for radius, angle in _CORNERS[thing.shape]
    ]


def _corners_at_equal_angles(radii: list[float], first: float = 0.0) -> list[tuple[float, float]]:
    """Return radius and angle of corners at equal angular distances.

    ``first`` is the angle of the first corner.
    """
    return [(radius, first + 2 * math.pi * i / len(radii)) for i, radius in enumerate(radii)]


def _corners_of_plus_sign(arm: float) -> list[tuple[float, float]]:
    """Return radius and angle of the corners of a plus sign whose arms are ``2 arm`` wide."""
    quarter = [(math.hypot(x, y), math.atan2(x, y)) for x, y in ((arm, 0.95), (arm, arm), (0.95, arm))]
    return [(radius, angle + i * math.pi / 2) for i in range(4) for radius, angle in quarter]


_CORNERS = {
    "circle": _corners_at_equal_angles([1.0] * 48),
    "square": _corners_at_equal_angles([1.0] * 4, math.pi / 4),
    "triangle": _corners_at_equal_angles([1.0] * 3),
    "star": _corners_at_equal_angles([1.0, 0.42] * 5),
    "cross": _corners_of_plus_sign(0.3),
}
"""Radius and angle (clockwise from the top) of the corners of each shape, in a circle of radius 1."""
