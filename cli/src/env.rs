//! `nccl-rdma env`: every setting, the value in force and where it comes from. The plugin's own table, so it can't be stale.

use std::path::PathBuf;

use comfy_table::{ContentArrangement, Table, presets};
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
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["name", "value", "from", "valid", "meaning"]);
    for s in config.describe() {
        table.add_row([s.name.to_owned(), shown(&s.value), s.origin.to_string(), s.valid, s.meaning.to_owned()]);
    }
    println!("{table}");
    for warning in warnings {
        println!("WARN {warning}");
    }
    for file in NcclFiles::from_process().0.iter().filter(|file| file.exists()) {
        println!("{}: NCCL also sets what stands there, unless the environment has it; not shown here", file.display());
    }
}

/// Files whose lines NCCL puts into its environment before it loads the plugin.
struct NcclFiles([PathBuf; 2]);

impl NcclFiles {
    fn from_process() -> Self {
        let set = |name| std::env::var_os(name).filter(|text| !text.is_empty()).map(PathBuf::from);
        let user = set("NCCL_CONF_FILE").or_else(|| Some(set("HOME")?.join(".nccl.conf")));
        Self([user.unwrap_or_default(), PathBuf::from("/etc/nccl.conf")])
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
         instead. Any other\n`NCCL_IB_*` variable that is set is told once as not honoured.\n\n| name | default | valid | meaning |\n|---|---|---|---|\n",
    );
    for s in settings {
        let [valid, meaning] = [&s.valid, s.meaning].map(|words| words.replace('|', "\\|"));
        text += &format!("| `{}` | {} | {valid} | {meaning} |\n", s.name, shown(&s.value));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_values_are_told() {
        let (defaults, _) = Config::load(&|_| None, std::iter::empty());
        let page = page(&defaults.describe());
        assert!(page.contains("| `NCCL_IB_TIMEOUT` | 20 | 1 to 31, or 0: for ever | "), "{page}");
    }

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
