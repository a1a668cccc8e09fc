//! `nccl-rdma env`: every setting, the value in force and where it comes from. The plugin's own table, so it can't be stale.

use comfy_table::{Table, presets};
use nccl_net_rdma::config::{Config, Setting};

/// Prints the settings as they are in force here; with `markdown` the table of `docs/environment.md`.
pub(crate) fn run(markdown: bool) {
    if markdown {
        let (defaults, _) = Config::load(&|_| None, std::iter::empty());
        print!("{}", page(&defaults.describe()));
        return;
    }
    let (config, warnings) = Config::from_process();
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["name", "value", "from", "meaning"]);
    for s in config.describe() {
        table.add_row([s.name.to_owned(), shown(&s.value), s.origin.to_string(), s.meaning.to_owned()]);
    }
    println!("{table}");
    for warning in warnings {
        println!("WARN {warning}");
    }
}

fn shown(value: &str) -> String {
    if value.is_empty() { "unset".to_owned() } else { value.to_owned() }
}

/// The page of the documentation.
fn page(settings: &[Setting]) -> String {
    let mut text = String::from(
        "# Environment variables\n\nMade by `nccl-rdma env --markdown` from the plugin's own table; `nccl-rdma env` shows the values in \
         force. Integers follow\nNCCL's rules (`0x10`, `010`). A value that makes no sense is told once, as a WARN, with what is used \
         instead. Any other\n`NCCL_IB_*` variable that is set is told once as not honoured.\n\n| name | default | meaning |\n|---|---|---|\n",
    );
    for s in settings {
        text += &format!("| `{}` | {} | {} |\n", s.name, shown(&s.value), s.meaning.replace('|', "\\|"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_is_the_table() {
        let (defaults, _) = Config::load(&|_| None, std::iter::empty());
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/environment.md");
        let written = std::fs::read_to_string(file).unwrap_or_default();
        assert!(
            written == page(&defaults.describe()),
            "docs/environment.md is not what `nccl-rdma env --markdown` prints: write it anew"
        );
    }
}
