"""Chinese words typed with other characters of the same sound, as an input method by pinyin offers them.

GB 2312 sorts its 3,755 common characters by their sound, so a character's place tells its syllable, without
tones. Of a character with several readings it is the one under which the standard has it.
"""

import bisect
from collections.abc import Iterator, Mapping

FIRSTS = (
    "啊埃鞍肮凹芭白斑邦苞杯奔崩逼鞭标鳖彬兵玻捕擦猜餐苍操厕层插拆搀昌超车郴撑吃充抽初揣川疮吹春戳疵聪"
    "凑粗蹿摧村磋搭呆耽当刀德蹬堤颠碉跌丁丢东兜督端堆墩掇蛾恩而发藩坊菲芬丰佛否夫噶该干冈篙哥给根耕工"
    "钩辜刮乖棺光瑰辊锅哈骸酣夯壕呵嘿痕哼轰喉呼花槐欢荒灰荤豁击嘉歼僵蕉揭巾荆炯揪鞠捐撅均喀开刊康考坷"
    "肯坑空抠枯夸块宽匡亏坤括垃莱蓝琅捞勒雷棱厘俩联粮撩列琳玲溜龙楼芦驴峦掠抡萝妈埋瞒芒猫么玫门萌眯棉"
    "苗蔑民明谬摸谋拇拿氖南囊挠呢馁嫩能妮蔫娘鸟捏\u60a8柠牛脓奴女暖虐挪哦欧啪拍攀乓抛呸喷砰坯篇飘撇拼乒坡"
    "扑期掐牵枪橇切钦青琼秋趋圈缺裙然瓤饶惹壬扔日戎揉茹软蕊闰若撒腮三桑搔瑟森僧莎筛珊墒梢奢砷声师收蔬"
    "刷摔栓霜谁吮说斯松搜苏酸虽孙蓑塌胎坍汤掏特藤梯天挑贴厅通偷凸湍推吞拖挖歪豌汪威瘟嗡挝巫昔瞎掀相萧"
    "楔薪星兄休墟轩靴勋压焉殃邀椰一茵英哟拥幽迂鸳曰耘匝栽咱赃遭责贼怎增扎摘瞻樟招遮珍蒸芝中舟珠抓拽专"
    "桩椎谆捉兹鬃邹租钻嘴尊昨"
)
"""The first character of each syllable, in the order of the standard."""

COMMON = 5  # texts that hold a pair; rarer ones are taken for the end of a word and the next one's beginning


def place_of(character: str) -> int | None:
    """The number of a common character in GB 2312; None if it is none."""
    try:
        code = int.from_bytes(character.encode("gb2312"))
    except UnicodeEncodeError:
        return None
    return code if 0xB0A1 <= code <= 0xD7F9 else None


_PLACES = [place_of(character) or 0 for character in FIRSTS]


def sounds_of(word: str) -> tuple[int, ...] | None:
    """The number of each character's syllable; None if one is no common character."""
    places = [place_of(character) for character in word]
    known = [bisect.bisect(_PLACES, place) for place in places if place is not None]
    return tuple(known) if len(known) == len(word) else None


class Homophones:
    """Of the pairs of characters that texts hold, those that a mistyped pair may mean.

    Args:
        counts: of each pair, how many texts hold it.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts
        self._pair_of: dict[tuple[int, ...], str] = {}
        for pair in sorted(counts, key=lambda pair: (-counts[pair], pair)):
            is_common = len(pair) == 2 and counts[pair] >= COMMON
            if is_common and (sounds := sounds_of(pair)) is not None:
                self._pair_of.setdefault(sounds, pair)

    def corrected(self, text: str) -> str:
        """A text in which pairs that no text holds are those of the same sound, the most common first."""
        while found := list(self._corrections(text)):
            _, start, pair = min(found)
            text = text[:start] + pair + text[start + 2 :]
        return text

    def _corrections(self, text: str) -> Iterator[tuple[int, int, str]]:
        """(minus its count, place, pair) of each pair that puts more right than it breaks."""
        for start in range(len(text) - 1):
            pair = text[start : start + 2]
            sounds = None if pair in self._counts else sounds_of(pair)
            if sounds is None or (other := self._pair_of.get(sounds)) is None:
                continue
            left, right = text[max(0, start - 1) : start], text[start + 2 : start + 3]
            if self._known(left + other + right) > self._known(left + pair + right):
                yield -self._counts[other], start, other

    def _known(self, text: str) -> int:
        return sum(text[start : start + 2] in self._counts for start in range(len(text) - 1))
