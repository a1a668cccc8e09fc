//! The list grammar that NCCL_IB_HCA and NCCL_SOCKET_IFNAME share: `[^][=]name,name,...`.
//!
//! `^` turns the whole list around, `=` makes all its names exact; without it a name is a prefix. Both stand once, in front.

use crate::config::Warning;

/// A parsed list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NameList {
    pub exclude: bool,
    pub exact: bool,
    pub items: Vec<String>,
}

impl NameList {
    /// `variable` is named in warnings. Items with a misplaced `^` or `=` are ignored and told.
    pub fn parse(variable: &str, text: &str) -> (Self, Vec<Warning>) {
        let mut warnings = Vec::new();
        let mut rest = text.trim();
        let exclude = rest.strip_prefix('^').inspect(|r| rest = r).is_some();
        let exact = rest.strip_prefix('=').inspect(|r| rest = r).is_some();
        let mut items = Vec::new();
        for item in rest.split(',').map(str::trim).filter(|i| !i.is_empty()) {
            if item.starts_with(['^', '=']) {
                warnings.push(Warning(format!(
                    "{variable}={text}: {item:?} is ignored: ^ and = stand once, in front of the whole list"
                )));
            } else {
                items.push(item.to_owned());
            }
        }
        (Self { exclude, exact, items }, warnings)
    }

    /// Whether `item` of the list names `name`.
    pub fn names(&self, item: &str, name: &str) -> bool {
        if self.exact { item == name } else { name.starts_with(item) }
    }
}
