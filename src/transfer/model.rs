//! All that may happen to a small connection with hinted and plain receives: an exhaustive search over the orders in which
//! writes of different QPs arrive, acknowledgements surface and either end makes its calls. The rules of [`super::hint`] are
//! the very ones that sender and receiver use; the ring has 4 entries.

#![expect(clippy::cast_possible_truncation, reason = "a ring of a few entries")]

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher as _, RandomState};

use super::hint::{Horizon, Ledger, pack};

const RING: usize = 4;
const QPS: usize = 2;

/// What is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mutation {
    None,
    /// The receiver takes an entry of a hinted receive for free.
    NoWindow,
    /// The sender counts what it has posted, acknowledged or not.
    CountsUnacknowledged,
    /// The sender never tells its count where plain sends move it.
    SilentAfterPlain,
    /// isend does not look for what has completed where a count waits for that.
    Forgets,
}

#[derive(Debug, Clone, Copy)]
struct Setting {
    /// Messages in all.
    messages: u32,
    /// Receives that are posted ahead of what has arrived.
    depth: u32,
    mutation: Mutation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Hinted,
    Plain,
    /// The first of a group of two, and the second.
    First,
    Second,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wire {
    Data(u32, Kind),
    Count(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Slot {
    Free,
    Open(u32),
    Hinted(u32),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    // Receiver.
    tail: u32,
    /// What the application posts next: it does not go on with something else.
    wanted: Option<&'static [Kind]>,
    slots: [Slot; RING],
    horizon: Horizon,
    /// The word that the sender writes.
    word: u64,
    /// Positions whose data are there or will never be written (empty hinted sends); bit per position.
    landed: u64,
    // Sender.
    ring: [Option<(u32, Kind)>; RING],
    head: u32,
    /// Of the group at the head, the second was matched first.
    second: bool,
    ledger: Ledger<RING, { RING as u32 / 2 }>,
    counting: bool,
    overdue: bool,
    next_qp: usize,
    // Between them.
    credits: VecDeque<(u32, Kind)>,
    wires: [VecDeque<Wire>; QPS],
    acks: [VecDeque<Wire>; QPS],
}

impl State {
    fn new() -> Self {
        Self {
            tail: 0,
            wanted: None,
            slots: [Slot::Free; RING],
            horizon: Horizon::default(),
            word: 0,
            landed: 0,
            ring: [None; RING],
            head: 0,
            second: false,
            ledger: Ledger::default(),
            counting: false,
            overdue: false,
            next_qp: 0,
            credits: VecDeque::new(),
            wires: Default::default(),
            acks: Default::default(),
        }
    }

    fn place(position: u32) -> usize {
        position as usize & (RING - 1)
    }

    /// Whether the sender has matched a position.
    fn matched(&self, position: u32) -> bool {
        position < self.head || self.second && position == self.head + 1
    }

    fn free(&self, position: u32, setting: Setting) -> bool {
        match self.slots[Self::place(position)] {
            Slot::Free => true,
            Slot::Open(_) => false,
            Slot::Hinted(_) => setting.mutation == Mutation::NoWindow,
        }
    }

    /// irecv. It looks at the count where it finds no room.
    fn post(&self, setting: Setting) -> Result<Option<Self>, String> {
        let Some(kinds) = self.wanted else { return Ok(None) };
        let n = kinds.len() as u32;
        // The application waits for data before it posts more.
        let arrived = (0..self.tail).take_while(|p| self.landed >> p & 1 == 1).count() as u32;
        if self.tail + n > arrived + setting.depth {
            return Ok(None);
        }
        let mut next = self.clone();
        next.wanted = None;
        if (0..n).any(|i| !next.free(next.tail + i, setting)) {
            let passed = next.horizon.learn(next.word, next.tail).map_err(|c| format!("a count of {c} is refused"))?;
            for position in passed {
                let slot = &mut next.slots[Self::place(position)];
                if *slot == Slot::Hinted(position) {
                    *slot = Slot::Free;
                    next.horizon.passed();
                    if self.landed >> position & 1 == 0 {
                        return Err(format!("the memory of {position} counts as untouched with its write under way"));
                    }
                }
            }
            if (0..n).any(|i| !next.free(next.tail + i, setting)) {
                next.wanted = self.wanted;
                return Ok((next != *self).then_some(next));
            }
        }
        for &kind in kinds {
            let position = next.tail;
            next.slots[Self::place(position)] = if kind == Kind::Hinted {
                next.horizon.posted(position);
                Slot::Hinted(position)
            } else {
                Slot::Open(position)
            };
            next.credits.push_back((position, kind));
            next.tail += 1;
        }
        Ok(Some(next))
    }

    /// A credit arrives.
    fn credit(&mut self) -> Result<(), String> {
        let Some((position, kind)) = self.credits.pop_front() else { return Ok(()) };
        let entry = &mut self.ring[Self::place(position)];
        let old = entry.replace((position, kind));
        match old {
            Some((old, _)) if !self.matched(old) => Err(format!("credit {old} is overwritten by {position} unread")),
            _ => Ok(()),
        }
    }

    /// Tells the count if it is due.
    fn tell(&mut self, setting: Setting) {
        self.overdue = false;
        let Some(count) = self.ledger.due(self.head) else { return };
        if self.counting {
            self.overdue = setting.mutation != Mutation::Forgets;
            return;
        }
        self.counting = true;
        self.ledger.told(self.head);
        self.wires[0].push_back(Wire::Count(count));
    }

    /// isend of the position, which is at the head or in its group.
    fn send(&self, position: u32, empty: bool, setting: Setting) -> Option<Self> {
        let (there, kind) = self.ring[Self::place(position)]?;
        if there != position || self.matched(position) || empty && kind != Kind::Hinted {
            return None;
        }
        let mut next = self.clone();
        if empty {
            next.landed |= 1 << position;
        } else {
            next.wires[next.next_qp].push_back(Wire::Data(position, kind));
            next.next_qp = (next.next_qp + 1) % QPS;
        }
        match kind {
            Kind::Hinted => {
                next.ledger.matched(position, !empty && setting.mutation != Mutation::CountsUnacknowledged);
                next.head += 1;
            }
            Kind::Plain => next.head += 1,
            // The group at the head is done once both are matched.
            Kind::First if next.second => (next.head, next.second) = (next.head + 2, false),
            Kind::First => return None,
            Kind::Second => next.second = true,
        }
        if next.ledger.owes() && (kind == Kind::Hinted || setting.mutation != Mutation::SilentAfterPlain) {
            next.tell(setting);
        }
        Some(next)
    }

    /// The oldest write of a QP arrives.
    fn arrive(&mut self, qp: usize) -> Result<(), String> {
        let Some(wire) = self.wires[qp].pop_front() else { return Ok(()) };
        match wire {
            Wire::Count(count) => self.word = pack(count),
            Wire::Data(position, kind) => {
                self.landed |= 1 << position;
                if kind != Kind::Hinted {
                    let slot = &mut self.slots[Self::place(position)];
                    if *slot != Slot::Open(position) {
                        return Err(format!("{position} arrives where {slot:?} is"));
                    }
                    *slot = Slot::Free;
                }
            }
        }
        // Those of plain sends mean nothing to the count.
        if !matches!(wire, Wire::Data(_, kind) if kind != Kind::Hinted) {
            self.acks[qp].push_back(wire);
        }
        Ok(())
    }

    /// The sender sees the oldest acknowledgement of a QP.
    fn acknowledge(&mut self, qp: usize, setting: Setting) {
        match self.acks[qp].pop_front() {
            Some(Wire::Data(position, Kind::Hinted)) => {
                self.ledger.acknowledged(position);
                self.tell(setting);
            }
            Some(Wire::Count(_)) => {
                self.counting = false;
                self.tell(setting);
            }
            _ => {}
        }
    }

    /// Everything that may happen next.
    fn next(&self, setting: Setting) -> Result<Vec<Self>, String> {
        let mut all = Vec::new();
        for kinds in [&[Kind::Hinted][..], &[Kind::Plain], &[Kind::First, Kind::Second]] {
            let n = kinds.len() as u32;
            if self.wanted.is_none() && n <= setting.depth && self.tail + n <= setting.messages {
                all.push(Self { wanted: Some(kinds), ..self.clone() });
            }
        }
        all.extend(self.post(setting)?);
        if !self.credits.is_empty() {
            let mut next = self.clone();
            next.credit()?;
            all.push(next);
        }
        for empty in [false, true] {
            all.extend(self.send(self.head, empty, setting));
        }
        // The second of a group may be matched first; it must be.
        if let Some((first, Kind::First)) = self.ring[Self::place(self.head)]
            && first == self.head
        {
            all.extend(self.send(self.head + 1, false, setting));
        }
        // Completions are taken by test, of which there is one for every send; by isend only for an overdue count.
        let data = |wire: &Wire| matches!(wire, Wire::Data(..));
        let polls = self.overdue || self.wires.iter().chain(&self.acks).flatten().any(data);
        for qp in 0..QPS {
            if !self.wires[qp].is_empty() {
                let mut next = self.clone();
                next.arrive(qp)?;
                all.push(next);
            }
            if polls && !self.acks[qp].is_empty() {
                let mut next = self.clone();
                next.acknowledge(qp, setting);
                all.push(next);
            }
        }
        Ok(all)
    }
}

/// Looks at every state that can be reached; the number of them.
fn explore(setting: Setting) -> Result<usize, String> {
    // States are remembered by 128 bits of hash: two that share one are not to be expected.
    let keys = [RandomState::new(), RandomState::new()];
    let mut seen = HashSet::new();
    let mut open = vec![State::new()];
    while let Some(state) = open.pop() {
        if !seen.insert([keys[0].hash_one(&state), keys[1].hash_one(&state)]) {
            continue;
        }
        let next = state.next(setting).map_err(|why| format!("{why}: {state:?}"))?;
        if next.is_empty() && (state.tail < setting.messages || state.head < state.tail) {
            return Err(format!("nothing goes on: {state:?}"));
        }
        open.extend(next);
    }
    Ok(seen.len())
}

#[test]
fn no_credit_is_overwritten_unread_and_nothing_hangs() {
    for (messages, depth) in [(9, 1), (7, 2), (6, 3), (6, 8)] {
        let states = explore(Setting { messages, depth, mutation: Mutation::None }).expect("every state is right");
        println!("depth {depth}: {states} states");
    }
}

/// The search sees what the rules are for.
#[test]
fn a_broken_rule_is_found() {
    for (mutation, found) in [
        (Mutation::NoWindow, "overwritten"),
        (Mutation::CountsUnacknowledged, "write under way"),
        (Mutation::SilentAfterPlain, "nothing goes on"),
        (Mutation::Forgets, "nothing goes on"),
    ] {
        let Err(why) = explore(Setting { messages: 7, depth: 8, mutation }) else {
            panic!("{mutation:?} is not found")
        };
        assert!(why.contains(found), "{mutation:?}: {why}");
    }
}
