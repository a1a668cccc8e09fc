//! What NCCL is asked to do: how many elements each rank gives and takes, and what must come out.

use anyhow::ensure;

use super::{differing, encoded, value_of};
use crate::gpu::{Communicator, Gpu, Kind, Place};

/// An operation of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
pub(crate) enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    /// To the next rank, from the one before
    SendRecv,
    /// Grouped sends and receives
    AllToAll,
}

/// One rank's part in an operation on `count` elements, as nccl-tests counts them: those of the larger buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    operation: Operation,
    kind: Kind,
    rank: usize,
    ranks: usize,
    /// Elements for each rank where they are dealt out, else all.
    chunk: usize,
    root: usize,
    /// Varies the data.
    round: usize,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::SendRecv => "sendrecv",
            Self::AllToAll => "alltoall",
        }
    }

    /// The operation on elements that it has, as nccl-tests prints it.
    pub(crate) fn reduction(self) -> &'static str {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::Reduce => "sum",
            _ => "none",
        }
    }

    /// Bytes over each link for one byte of the buffer, after nccl-tests.
    #[expect(clippy::cast_precision_loss, reason = "a handful of ranks")]
    pub(crate) fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks as f64 - 1.0) / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => others,
            Self::Broadcast | Self::Reduce | Self::SendRecv => 1.0,
        }
    }

    fn deals(self) -> bool {
        matches!(self, Self::AllGather | Self::ReduceScatter | Self::AllToAll)
    }

    /// Elements of the larger buffer: at least one for each rank where they are dealt out.
    pub(crate) fn elements(self, count: usize, ranks: usize) -> usize {
        if self.deals() { (count / ranks).max(1) * ranks } else { count }
    }
}

impl Part {
    pub(crate) fn new(operation: Operation, kind: Kind, count: usize, round: usize, rank: usize, ranks: usize) -> Self {
        let all = operation.elements(count, ranks);
        let chunk = if operation.deals() { all / ranks } else { all };
        Self { operation, kind, rank, ranks, chunk, root: round % ranks, round }
    }

    /// The same with the data of another round.
    pub(crate) fn renewed(self, round: usize) -> Self {
        Self { round, ..self }
    }

    /// Elements that this rank gives.
    fn given(&self) -> usize {
        match self.operation {
            Operation::ReduceScatter | Operation::AllToAll => self.chunk * self.ranks,
            _ => self.chunk,
        }
    }

    /// Elements that this rank takes.
    fn taken(&self) -> usize {
        match self.operation {
            Operation::AllGather | Operation::AllToAll => self.chunk * self.ranks,
            _ => self.chunk,
        }
    }

    /// Where in one buffer both lie, in bytes: what is given, what is taken. None: it needs two.
    pub(crate) fn in_place(&self) -> Option<(usize, usize)> {
        let own = self.rank * self.chunk * self.kind.size();
        match self.operation {
            Operation::AllReduce | Operation::Broadcast | Operation::Reduce => Some((0, 0)),
            Operation::AllGather => Some((own, 0)),
            Operation::ReduceScatter => Some((0, own)),
            Operation::SendRecv | Operation::AllToAll => None,
        }
    }

    /// Element `i` of what this rank gives.
    fn gives(&self, i: usize) -> i32 {
        value_of(self.kind, self.rank, i, self.round)
    }

    /// Element `i` of what this rank must take; None: what comes is not for it.
    fn takes(&self, i: usize) -> Option<i32> {
        let of = |rank, i| value_of(self.kind, rank, i, self.round);
        let summed = |i| (0..self.ranks).map(|rank| of(rank, i)).sum();
        match self.operation {
            Operation::AllReduce => Some(summed(i)),
            Operation::AllGather => Some(of(i / self.chunk, i % self.chunk)),
            Operation::ReduceScatter => Some(summed(self.rank * self.chunk + i)),
            Operation::Broadcast => Some(of(self.root, i)),
            Operation::Reduce => (self.rank == self.root).then(|| summed(i)),
            Operation::SendRecv => Some(of(self.before(), i)),
            Operation::AllToAll => Some(of(i / self.chunk, self.rank * self.chunk + i % self.chunk)),
        }
    }

    /// All that this rank gives, as it lies in memory.
    pub(crate) fn input(&self) -> Vec<u8> {
        encoded(self.kind, self.given(), |i| self.gives(i))
    }

    /// Bytes that this rank takes.
    pub(crate) fn taken_bytes(&self) -> usize {
        self.taken() * self.kind.size()
    }

    /// Elements that are others than this rank must take.
    pub(crate) fn wrong(&self, got: &[u8]) -> u64 {
        differing(self.kind, got, |i| self.takes(i))
    }

    fn before(&self) -> usize {
        (self.rank + self.ranks - 1) % self.ranks
    }

    /// Queues it.
    pub(crate) fn queue(
        &self,
        comm: &Communicator<'_>,
        gpu: &Gpu,
        from: Place<'_>,
        to: Place<'_>,
    ) -> anyhow::Result<()> {
        let (count, root, kind) = (self.chunk, self.root, self.kind);
        ensure!(count > 0, "an operation without elements");
        match self.operation {
            Operation::AllReduce => comm.all_reduce(gpu, from, to, count, kind),
            Operation::AllGather => comm.all_gather(gpu, from, to, count, self.ranks, kind),
            Operation::ReduceScatter => comm.reduce_scatter(gpu, from, to, count, self.ranks, kind),
            Operation::Broadcast => comm.broadcast(gpu, from, to, count, kind, root),
            Operation::Reduce => comm.reduce(gpu, from, to, count, kind, root),
            Operation::SendRecv => comm.group(|| {
                comm.send(gpu, from, count, kind, (self.rank + 1) % self.ranks)?;
                comm.recv(gpu, to, count, kind, self.before())
            }),
            Operation::AllToAll => comm.group(|| {
                (0..self.ranks).try_for_each(|peer| {
                    comm.send(gpu, from.skip(peer * count * kind.size()), count, kind, peer)?;
                    comm.recv(gpu, to.skip(peer * count * kind.size()), count, kind, peer)
                })
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    /// Plays an operation by its definition over what the ranks give.
    fn played(operation: Operation, kind: Kind, count: usize, ranks: usize, round: usize) {
        let part = |rank| Part::new(operation, kind, count, round, rank, ranks).renewed(round + 9);
        let parts: Vec<_> = (0..ranks).map(part).collect();
        let given: Vec<Vec<i32>> = parts.iter().map(|p| (0..p.given()).map(|i| p.gives(i)).collect()).collect();
        let total: Vec<i32> = (0..given[0].len()).map(|i| given.iter().map(|g| g[i]).sum()).collect();
        for (rank, part) in parts.iter().enumerate() {
            let taken: Vec<Option<i32>> = (0..part.taken()).map(|i| part.takes(i)).collect();
            let chunk = part.chunk;
            let must: Vec<i32> = match operation {
                Operation::AllReduce => total.clone(),
                Operation::AllGather => given.concat(),
                Operation::ReduceScatter => total[rank * chunk..][..chunk].to_vec(),
                Operation::Broadcast => given[round % ranks].clone(),
                Operation::Reduce if rank != round % ranks => {
                    assert!(taken.iter().all(Option::is_none));
                    continue;
                }
                Operation::Reduce => total.clone(),
                Operation::SendRecv => given[(rank + ranks - 1) % ranks].clone(),
                Operation::AllToAll => given.iter().flat_map(|g| g[rank * chunk..][..chunk].to_vec()).collect(),
            };
            assert_eq!(taken, must.into_iter().map(Some).collect::<Vec<_>>(), "{operation:?}, rank {rank}");
            let larger = part.given().max(part.taken());
            assert_eq!(larger, operation.elements(count, ranks));
            if let Some((from, to)) = part.in_place() {
                let larger = larger * kind.size();
                assert!(from + part.input().len() <= larger && to + part.taken_bytes() <= larger);
            }
        }
    }

    #[test]
    fn results_are_judged_exactly() {
        for kind in [Kind::Float, Kind::Int32, Kind::Half, Kind::Int8, Kind::Double] {
            let part = |rank| Part::new(Operation::AllReduce, kind, 100, 3, rank, 2);
            let mut got = encoded(kind, 100, |i| part(0).gives(i) + part(1).gives(i));
            assert_eq!(part(1).wrong(&got), 0);
            assert!(part(1).renewed(5).wrong(&got) > 50, "another round's result is wrong");
            got[17 * kind.size()] ^= 1;
            assert_eq!(part(1).wrong(&got), 1);
        }
        let part = Part::new(Operation::AllToAll, Kind::Int32, 2, 0, 1, 2);
        assert_eq!(part.input()[4..], part.gives(1).to_ne_bytes());
    }

    #[test]
    fn what_must_come_out_follows_from_what_goes_in() {
        for &operation in Operation::value_variants() {
            for (count, ranks) in [(2, 4), (12, 3), (1000, 4)] {
                for round in 0..3 {
                    for kind in [Kind::Int8, Kind::Float] {
                        played(operation, kind, count, ranks, round);
                    }
                }
            }
        }
    }
}
