//! Which libibverbs a command's processes take, and what soft-hca is told where that is it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// What soft-hca is told to be when nobody says otherwise.
const FABRIC: &str = include_str!("../../soft-hca/examples/gpu.toml");

#[derive(Debug, clap::Args)]
pub(crate) struct AdapterArgs {
    /// The libibverbs to use [default: the system's]
    #[arg(long, value_name = "PATH", env = "NCCL_IBVERBS_LIB")]
    adapter: Option<PathBuf>,
    /// The fabric file for soft-hca, with the hosts h0, h1, ... [default: soft-hca/examples/gpu.toml]
    #[arg(long, value_name = "FILE", env = "SOFT_HCA_FABRIC")]
    fabric: Option<PathBuf>,
}

/// What both the plugin and soft-hca go by: files of one host, which mean nothing on another.
pub(crate) const VARIABLES: [&str; 2] = ["NCCL_IBVERBS_LIB", "SOFT_HCA_FABRIC"];

/// Files, by absolute paths unless the dynamic linker is to find them.
#[derive(Clone, Debug)]
pub(crate) struct Adapter {
    pub(crate) library: Option<PathBuf>,
    pub(crate) fabric: Option<PathBuf>,
}

impl AdapterArgs {
    /// Writes the fabric file to `folder` unless there is one.
    pub(crate) fn resolve(&self, folder: &Path) -> anyhow::Result<Adapter> {
        let library = self
            .adapter
            .as_ref()
            .map(|path| if path.components().count() > 1 { std::path::absolute(path) } else { Ok(path.clone()) });
        let library = library.transpose()?;
        let fabric = match &self.fabric {
            Some(file) => Some(file.canonicalize().with_context(|| file.display().to_string())?),
            None if library.is_some() => {
                let file = folder.join("fabric.toml");
                fs::write(&file, FABRIC).with_context(|| file.display().to_string())?;
                Some(file)
            }
            None => None,
        };
        Ok(Adapter { library, fabric })
    }
}

impl Adapter {
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        let set = |(name, file): (&str, &Option<PathBuf>)| {
            file.as_ref().map(|file| (name.to_owned(), file.to_string_lossy().into_owned()))
        };
        VARIABLES.into_iter().zip([&self.library, &self.fabric]).filter_map(set).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_hca_gets_a_fabric_where_nobody_brings_one() {
        let folder = tempfile::tempdir().unwrap();
        let args = AdapterArgs { adapter: Some("/soft-hca/libibverbs.so.1".into()), fabric: None };
        let env = args.resolve(folder.path()).unwrap().environment();
        let file = folder.path().join("fabric.toml");
        assert_eq!(env[0], ("NCCL_IBVERBS_LIB".to_owned(), "/soft-hca/libibverbs.so.1".to_owned()));
        assert_eq!(env[1], ("SOFT_HCA_FABRIC".to_owned(), file.display().to_string()));
        assert!(fs::read_to_string(&file).unwrap().contains("gpu_dmabuf = true"));
        let real = AdapterArgs { adapter: None, fabric: None };
        assert!(real.resolve(folder.path()).unwrap().environment().is_empty());
        let missing = AdapterArgs { adapter: None, fabric: Some("/nonexistent/fabric.toml".into()) };
        assert!(missing.resolve(folder.path()).unwrap_err().to_string().contains("/nonexistent/fabric.toml"));
    }
}
